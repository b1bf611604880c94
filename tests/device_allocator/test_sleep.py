# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import logging
from types import SimpleNamespace

import pytest
import torch

from tests.device_allocator.fake_extension import FakeExtension
from vllm.device_allocator import cumem, sleeper
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.device_allocator.segment_table import Segment
from vllm.device_allocator.sleep_report import shortage

CONTENT = {
    0x1000: ("weights", b"first weights"),
    0x2000: ("kv_cache", b"keys and values"),
    0x3000: ("weights", b"second"),
    0x4000: ("runtime", b"state"),
}


@pytest.fixture
def extension(monkeypatch):
    fake = FakeExtension()
    monkeypatch.setattr(cumem, "create_and_map", fake.create_and_map)
    monkeypatch.setattr(cumem, "unmap_and_release", fake.unmap_and_release)
    monkeypatch.setattr(sleeper, "libcudart", fake)
    monkeypatch.setattr(sleeper, "cumem_available", False)
    monkeypatch.setattr(sleeper, "gc", SimpleNamespace(collect=lambda: None))
    for address, (tag, content) in CONTENT.items():
        fake.allocate(address, tag, content)
    return fake


@pytest.fixture
def logged(monkeypatch):
    """The messages of the logger of sleep and wake, whether or not it propagates."""
    messages: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(
        handler, "emit", lambda record: messages.append(record.getMessage())
    )
    sleeper.logger.addHandler(handler)
    yield messages
    sleeper.logger.removeHandler(handler)


@pytest.fixture
def drains():
    return []


@pytest.fixture
def allocator(monkeypatch, extension, drains):
    monkeypatch.setattr(cumem, "extension", object())
    monkeypatch.setattr(cumem, "make_segment_table", lambda _: extension)
    allocator = CuMemAllocator()
    allocator._generations = SimpleNamespace(drain=lambda: drains.append(True))
    return allocator


def contents(extension) -> dict[int, bytes]:
    return {address: bytes(data) for address, data in extension.memory.items()}


def awake(*tags: str) -> dict[int, bytes]:
    return {a: content for a, (tag, content) in CONTENT.items() if tag in tags}


LOST = b"\xa5"


def test_kept_tags_come_back_and_others_are_lost(allocator, extension):
    for _ in range(3):
        allocator.sleep(offload_tags=("weights", "runtime"))
        assert contents(extension) == {}
        assert allocator.get_current_usage() == sum(
            len(content) for _, content in CONTENT.values()
        )
        allocator.wake_up()
        assert contents(extension) == awake("weights", "runtime") | {
            0x2000: LOST * len(CONTENT[0x2000][1])
        }
        assert not allocator._mover.host_copies
    assert not extension.held


def test_partial_wake_defers_only_weights_and_kv_cache(allocator, extension):
    allocator.sleep(offload_tags=("weights", "runtime"))
    allocator.wake_up(tags=["weights"])
    assert contents(extension) == awake("weights", "runtime")
    allocator.wake_up(tags=["kv_cache"])
    assert len(extension.memory) == len(CONTENT)


def test_pending_frees_are_drained_before_anything_is_copied(
    allocator, extension, monkeypatch
):
    """What PyTorch can give back is neither copied to the host nor woken later."""
    monkeypatch.setattr(
        allocator._generations, "drain", lambda: extension.rows.pop(0x3000, None)
    )
    extension.memory.pop(0x3000)
    allocator.sleep(offload_tags=("weights",))
    allocator.wake_up()
    assert 0x3000 not in extension.memory


def test_wake_that_lacks_memory_names_the_tags_and_can_be_repeated(
    allocator, extension
):
    allocator.sleep(offload_tags=("weights", "runtime"))
    extension.capacity = 15
    with pytest.raises(RuntimeError) as raised:
        allocator.wake_up()
    assert contents(extension) == {}
    for text in (
        "OUT_OF_MEMORY, for the tag weights",
        "0.00 GiB for kv_cache",
        "repeat the call",
    ):
        assert text in str(raised.value)
    extension.capacity = 1 << 60
    allocator.wake_up()
    assert awake("weights", "runtime").items() <= contents(extension).items()


def test_shortage_counts_by_tag_what_is_asleep(allocator, extension):
    gib = 1 << 30
    asleep = [
        Segment(0, size * gib, size, 1, tag, True, size, 0)
        for size, tag in [(1, "weights"), (2, "weights"), (4, "kv_cache")]
    ]
    mapped = asleep[0]._replace(asleep=False)
    text = shortage([*asleep, mapped])
    assert "3.00 GiB for weights, 4.00 GiB for kv_cache" in text


def test_segment_freed_while_asleep_takes_its_host_copy_along(allocator, extension):
    allocator.sleep(offload_tags=("weights",))
    extension.free(0x1000)
    allocator.wake_up()
    assert 0x1000 not in extension.memory
    assert not allocator._mover.host_copies


def test_reused_address_does_not_get_an_older_copy(allocator, extension):
    allocator.sleep(offload_tags=("weights",))
    extension.free(0x1000)
    extension.allocate(0x1000, "weights", b"somebody else")
    allocator.wake_up()
    assert contents(extension)[0x1000] == b"somebody else"


def test_segment_freed_between_snapshot_and_copy(allocator, extension, monkeypatch):
    """As another thread's out-of-memory retry does."""
    segments = extension.segments()
    extension.free(0x1000)
    monkeypatch.setattr(extension, "segments", lambda: segments)
    allocator.sleep(offload_tags=("weights",))
    assert contents(extension) == {}


def test_discard_loses_contents_of_its_tags_only(allocator, extension, drains):
    allocator.discard("kv_cache")
    assert contents(extension) == awake("weights", "runtime")
    assert drains
    allocator.wake_up()
    assert contents(extension)[0x2000] == LOST * len(CONTENT[0x2000][1])


@pytest.mark.parametrize("again", ["sleep", "discard"])
def test_first_choice_of_what_to_keep_holds(allocator, extension, logged, again):
    allocator.sleep(offload_tags=("weights",))
    if again == "sleep":
        allocator.sleep(offload_tags=())
    else:
        allocator.discard("weights")
    assert any("stay as they were put to sleep" in text for text in logged)
    allocator.wake_up(tags=["weights"])
    assert awake("weights").items() <= contents(extension).items()


def test_lost_weights_are_pointed_out_once(allocator, extension, logged):
    for _ in range(2):
        allocator.sleep(offload_tags=("runtime",))
        allocator.wake_up(tags=["kv_cache"])
        allocator.wake_up(tags=["weights"])
    assert sum("undefined now" in text for text in logged) == 1


def test_kept_weights_are_no_cause_for_a_warning(allocator, extension, logged):
    allocator.sleep(offload_tags=("weights",))
    allocator.wake_up()
    allocator.wake_up()
    assert not any("undefined now" in text for text in logged)


def test_mapped_bytes_are_those_awake(allocator, extension):
    assert allocator.mapped_bytes == extension.mapped()
    allocator.discard("kv_cache")
    assert allocator.mapped_bytes == extension.mapped()
    allocator.sleep()
    assert allocator.mapped_bytes == 0


def test_memory_is_reused_by_the_next_sleep(allocator, extension, monkeypatch):
    """Only registered memory is kept, so lock it in name."""
    locked = SimpleNamespace(register=lambda *_: None, unregister=lambda *_: None)
    monkeypatch.setattr(allocator._mover.store, "_runtime", locked)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    addresses = []
    for _ in range(3):
        allocator.sleep(offload_tags=("weights",))
        copies = allocator._mover.host_copies
        addresses.append(sorted(piece.address for piece in copies.values()))
        allocator.wake_up()
    assert addresses[0] == addresses[1] == addresses[2]
    assert awake("weights").items() <= contents(extension).items()


def test_errors_of_the_extension_are_logged_once(allocator, extension, logged):
    extension.errors = ["my_free of the segment at 0x1000: CUDA_ERROR_UNKNOWN"]
    allocator.sleep()
    allocator.wake_up()
    assert sum("CUDA_ERROR_UNKNOWN" in text for text in logged) == 1


def test_pointer_to_data_is_a_copy(allocator, extension):
    allocator.sleep(offload_tags=("weights",))
    data = allocator.pointer_to_data
    assert bytes(data[0x1000].cpu_backup_tensor.numpy()) == CONTENT[0x1000][1]
    assert data[0x2000].cpu_backup_tensor is None
    data.clear()
    assert allocator.pointer_to_data


def test_moves_are_counted_by_operation(allocator, extension):
    size = {tag: 0 for tag, _ in CONTENT.values()}
    for tag, content in CONTENT.values():
        size[tag] += len(content)
    allocator.discard("kv_cache")
    allocator.sleep(offload_tags=("weights",))
    allocator.wake_up()
    moves = allocator.take_moves()
    assert {name: (m["copied"], m["emptied"]) for name, m in moves.items()} == {
        "discard": (0, size["kv_cache"]),
        "sleep": (size["weights"], size["runtime"]),
        "wake": (size["weights"], size["runtime"] + size["kv_cache"]),
    }
    assert all(m["seconds"] > 0 for m in moves.values())
    assert allocator.take_moves() == {}
