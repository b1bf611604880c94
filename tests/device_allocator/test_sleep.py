# SPDX-License-Identifier: Apache-2.0
import logging
from types import SimpleNamespace

import pytest

from tests.device_allocator.fake_extension import FakeExtension
from vllm.device_allocator import cumem
from vllm.device_allocator.cumem import CuMemAllocator

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
    monkeypatch.setattr(cumem, "libcudart", fake)
    monkeypatch.setattr(cumem, "PIN_MEMORY", False)
    for address, (tag, content) in CONTENT.items():
        fake.allocate(address, tag, content)
    return fake


@pytest.fixture
def logged():
    """The messages of the allocator's logger, whether or not it propagates."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    cumem.logger.addHandler(handler)
    yield messages
    cumem.logger.removeHandler(handler)


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
        assert not allocator._host_copies
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


def test_wake_that_lacks_memory_can_be_repeated(allocator, extension):
    allocator.sleep(offload_tags=("weights", "runtime"))
    extension.capacity = 15
    with pytest.raises(RuntimeError, match="OUT_OF_MEMORY"):
        allocator.wake_up(tags=["weights"])
    assert contents(extension) == {0x1000: b"first weights"}
    extension.capacity = 1 << 60
    allocator.wake_up()
    assert awake("weights", "runtime").items() <= contents(extension).items()


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_failed_copy_puts_its_segment_back_to_sleep(allocator, extension, copies):
    """A mapped segment without its contents must not pass for a woken one."""
    allocator.sleep(offload_tags=("weights", "runtime"))
    extension.copies_left = copies
    with pytest.raises(RuntimeError, match="cudaMemcpy"):
        allocator.wake_up(tags=["weights"])
    assert len(extension.memory) == copies
    extension.copies_left = 1 << 60
    allocator.wake_up(tags=["weights"])
    assert contents(extension) == awake("weights", "runtime")


def test_failed_sleep_can_be_repeated(allocator, extension):
    extension.copies_left = 1
    with pytest.raises(RuntimeError, match="cudaMemcpy"):
        allocator.sleep(offload_tags=("weights", "runtime"))
    extension.copies_left = 1 << 60
    allocator.sleep(offload_tags=("weights", "runtime"))
    assert contents(extension) == {}
    allocator.wake_up(tags=["weights"])
    assert contents(extension) == awake("weights", "runtime")
    assert not extension.held


def test_segment_freed_while_asleep_takes_its_host_copy_along(allocator, extension):
    allocator.sleep(offload_tags=("weights",))
    extension.free(0x1000)
    allocator.wake_up()
    assert 0x1000 not in extension.memory
    assert not allocator._host_copies


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
