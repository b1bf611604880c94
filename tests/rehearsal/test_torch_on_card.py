# SPDX-License-Identifier: Apache-2.0
"""Real PyTorch on the simulated card."""


def test_the_card_is_the_one_asked_for(run_torch):
    result = run_torch(
        """
        import pynvml
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(1)
        p = torch.cuda.get_device_properties(1)
        answer(count=torch.cuda.device_count(), name=p.name, memory=p.total_memory,
               capability=torch.cuda.get_device_capability(),
               nvml=pynvml.nvmlDeviceGetMemoryInfo(handle).total,
               nvml_name=pynvml.nvmlDeviceGetName(handle),
               uuid=pynvml.nvmlDeviceGetUUID(handle)[4:] == str(p.uuid))
        """,
        memory="15.5GiB",
    ).check()
    memory = int(15.5 * 2**30)
    assert result.answer == {
        "count": 2,
        "name": "Simulated card, SM 12.0",
        "memory": memory,
        "capability": [12, 0],
        "nvml": memory,
        "nvml_name": "Simulated card, SM 12.0",
        "uuid": True,
    }


def test_allocator_and_card_agree(run_torch):
    """Segments, the free memory, and PyTorch's out-of-memory retry."""
    result = run_torch(
        """
        torch.empty(1, device="cuda")
        base = card.used() - torch.cuda.memory_reserved()
        pieces = [torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
                  for _ in range(30)]
        full = card.used() - base == torch.cuda.memory_reserved()
        pieces.clear()
        # 3 GiB of free segments are in the way: the allocator must give them back.
        large = torch.empty(3000 << 20, dtype=torch.uint8, device="cuda")
        free, total = torch.cuda.mem_get_info()
        try:
            torch.empty(3000 << 20, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            text = str(error)
        answer(full=full, refusals=card.refusals(), text=text,
               used=total - free == card.used())
        """,
        memory="4GiB",
    ).check()
    assert result.answer["full"]
    assert result.answer["used"]
    assert result.answer["refusals"] == 3  # one retried, the last one twice
    assert "Tried to allocate 2.93 GiB" in result.answer["text"]
    assert "total capacity of 4.00 GiB" in result.answer["text"]


def test_data_moves_and_kernels_do_nothing(run_torch):
    result = run_torch("""
        data = torch.arange(100_000, dtype=torch.int64)
        there = data.cuda()
        back = there.clone().cpu()
        pinned = torch.empty_like(data, pin_memory=True)
        pinned.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        answer(same=bool((back == data).all() and (pinned == data).all()),
               pinned=pinned.is_pinned(),
               kernel=bool((there + 1).cpu().equal(data + 1)))
    """).check()
    assert result.answer["same"]
    assert result.answer["pinned"]
    assert not result.answer["kernel"]


def test_capture_forbids_what_the_driver_forbids(run_torch):
    result = run_torch("""
        stream = torch.cuda.Stream()
        x = torch.zeros(10, device="cuda")

        def attempt(work):
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            try:
                with torch.cuda.graph(graph, stream=stream):
                    x.add_(1)
                    work()
            except Exception as error:
                return str(error).splitlines()[0]
            graph.replay()
            return "captured"

        answer(
            plain=attempt(lambda: None),
            allocating=attempt(lambda: torch.empty(5 << 20, device="cuda")),
            synchronizing=attempt(torch.cuda.synchronize),
        )
    """)
    assert result.status == 0, result.stderr
    assert result.answer["plain"] == "captured"
    assert result.answer["allocating"] == "captured"
    assert "previous error during capture" in result.answer["synchronizing"]


def test_streams_and_events(run_torch):
    result = run_torch("""
        a, b, never = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        stream = torch.cuda.Stream(priority=-1)
        with torch.cuda.stream(stream):
            a.record()
            b.record()
        b.synchronize()
        try:
            a.elapsed_time(never)
            unrecorded = "no error"
        except Exception as error:
            unrecorded = "refused"
        answer(elapsed=a.elapsed_time(b) > 0, priority=stream.priority,
               query=stream.query(), unrecorded=unrecorded)
    """).check()
    assert result.answer == {
        "elapsed": True,
        "priority": -1,
        "query": True,
        "unrecorded": "refused",
    }


def test_a_forked_child_has_a_card_of_its_own(run_torch):
    """What fault injection and the rehearsal server build on."""
    result = run_torch("""
        import os
        used = []
        for size in (1, 2):
            out, into = os.pipe()
            if os.fork() == 0:
                card.resize((4 + size) << 30)
                x = torch.empty(size << 30, dtype=torch.uint8, device="cuda")
                os.write(into, f"{torch.cuda.memory_reserved()} "
                               f"{torch.cuda.mem_get_info()[1]}".encode())
                os._exit(0)
            os.wait()
            used.append(os.read(out, 100).decode())
        answer(used=used, here=card.used())
    """).check()
    assert result.answer == {
        "used": [f"{1 << 30} {5 << 30}", f"{2 << 30} {6 << 30}"],
        "here": 0,
    }


def test_a_card_with_a_context_keeps_its_size(run_torch):
    result = run_torch("""
        torch.empty(1, device="cuda")
        try:
            card.resize(8 << 30)
        except RuntimeError as error:
            answer(text=str(error))
    """).check()
    assert "cannot be resized" in result.answer["text"]


def test_first_launch_and_communicators_are_charged(fronts):
    import dataclasses
    import sys

    from tools.rehearsal.calibration import Calibration
    from tools.rehearsal.cards import Card
    from tools.rehearsal.testing import run_on_card

    constants = Calibration(
        context_bytes=300 << 20, first_launch_bytes=70 << 20, reserved_bytes=100 << 20
    )
    card = dataclasses.replace(Card("c", "9.0", 4 << 30), calibration=constants)
    program = """
import json, os, torch
def used():
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()
torch.empty(1, device="cuda")
before = used()
torch.ones(1, device="cuda") + 1
with open(os.environ["REHEARSAL_TEST_ANSWER"], "w") as file:
    json.dump({"before": before, "after": used()}, file)
"""
    result = run_on_card([sys.executable, "-c", program], card).check()
    assert result.answer == {"before": 400 << 20, "after": 470 << 20}


def test_every_loaded_cuda_library_is_a_front(run_torch, fronts):
    """Whoever asks, by RPATH, by full path, or under a mangled name."""
    result = run_torch("""
        import torchvision, vllm._C_stable_libtorch
        torch.empty(1, device="cuda")
        with open("/proc/self/maps") as maps:
            paths = {line.split()[-1] for line in maps if ".so" in line}
        names = ("libcuda", "libcudart", "libcublas", "libnccl", "libnvidia-ml")
        answer(paths=sorted(p for p in paths if p.rsplit("/")[-1].startswith(names)))
    """).check()
    assert result.answer["paths"]
    for path in result.answer["paths"]:
        assert path.startswith(str(fronts))
