"""Pinned host memory next to its device, with stand-ins for CUDA and for the kernel's files."""

import ctypes
import gc
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hyperpod_plugins.memory import host_pool

CUDA, SIZE = torch.device("cuda", 1), 4 * 4096
ALLOWED = {0, 1, 2, 3, 8}


class Runtime:
    """CUDA's, as far as it registers memory."""

    def __init__(self):
        self.status, self.registered, self.num_errors_taken = 0, {}, 0

    def cudaHostRegister(self, address, num_bytes, flags):
        if not self.status:
            self.registered[address] = num_bytes
        return self.status

    def cudaHostUnregister(self, address):
        del self.registered[address]

    def cudaGetLastError(self):
        self.num_errors_taken += 1


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Two GPUs, the second of which is next to CPUs 2, 3 and 9."""
    devices = [(0, 0x17, 0), (1, 0x3B, 0x1C)]
    for (domain, bus, slot), cpus in zip(devices, ("0-1,8\n", "2-3,9\n"), strict=True):
        folder = tmp_path / f"sys/bus/pci/devices/{domain:04x}:{bus:02x}:{slot:02x}.0"
        folder.mkdir(parents=True)
        (folder / "local_cpulist").write_text(cpus)
    found = SimpleNamespace(
        runtime=Runtime(),
        cpus=set(ALLOWED),
        touched=[],
        file=tmp_path / "sys/bus/pci/devices/0001:3b:1c.0/local_cpulist",
    )

    def properties(device):
        domain, bus, slot = devices[device.index]
        return SimpleNamespace(pci_domain_id=domain, pci_bus_id=bus, pci_device_id=slot)

    def touch(address, value, num_bytes, memset=ctypes.memset):
        found.touched.append((num_bytes, set(found.cpus)))
        memset(address, value, num_bytes)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found.runtime)
    monkeypatch.setattr(ctypes, "memset", touch)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(found.cpus))
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cpus: setattr(found, "cpus", set(cpus)))
    monkeypatch.setattr(host_pool, "Path", lambda path: tmp_path / Path(path).relative_to("/"))
    return found


def test_pages_are_touched_on_the_cpus_next_to_the_device(machine):
    block = host_pool.allocate_near(CUDA, SIZE)
    assert machine.touched == [(SIZE, {2, 3})]  # not 9, which this process may not use
    assert machine.cpus == ALLOWED
    assert (block.dtype, block.shape, block.count_nonzero()) == (torch.uint8, (SIZE,), 0)
    assert machine.runtime.registered == {block.data_ptr(): SIZE}
    host_pool.allocate_near(torch.device("cuda", 0), SIZE)
    assert machine.touched[1] == (SIZE, {0, 1, 8})


def test_a_pool_allocates_there_once_and_unpins_what_it_drops(machine):
    pool = host_pool.HostPool(CUDA, budget_bytes=2 * SIZE)
    for _ in range(3):
        pool.release(pool.acquire(SIZE - 5))
    assert machine.touched == [(SIZE, {2, 3})]
    assert list(machine.runtime.registered.values()) == [SIZE]
    block = pool.acquire(2 * SIZE)  # in its place
    gc.collect()
    assert machine.runtime.registered == {block.memory.data_ptr(): 2 * SIZE}


@pytest.mark.parametrize("text", [None, "", "garbage", "9-10\n"])
def test_without_cpus_to_use_the_thread_stays_where_it_is(machine, text):
    if text is None:
        machine.file.unlink()
    else:
        machine.file.write_text(text)
    host_pool.allocate_near(CUDA, SIZE)
    assert machine.touched == [(SIZE, ALLOWED)]
    assert machine.cpus == ALLOWED


def test_a_system_that_does_not_say_where_its_devices_are(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    host_pool.allocate_near(CUDA, SIZE)
    assert machine.touched == [(SIZE, ALLOWED)]


def test_an_error_leaves_the_thread_on_its_cpus(machine):
    def fail():
        with host_pool._on_node_of(CUDA):
            assert machine.cpus == {2, 3}
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert machine.cpus == ALLOWED


def test_memory_that_cuda_does_not_pin_is_used_as_it_is(machine, caplog):
    machine.runtime.status = 2
    with caplog.at_level(logging.WARNING):
        block = host_pool.allocate_near(CUDA, SIZE)
    assert f"{SIZE} bytes of host memory were not pinned (CUDA error 2)" in caplog.text
    assert machine.runtime.num_errors_taken == 1
    del block  # what was not registered is not unregistered
    gc.collect()
    assert not machine.runtime.registered


def test_memory_for_a_cpu_is_neither_moved_nor_pinned(machine):
    assert host_pool.allocate_near(torch.device("cpu"), SIZE).shape == (SIZE,)
    assert not machine.touched
    assert not machine.runtime.registered
