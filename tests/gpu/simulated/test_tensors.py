"""The simulated GPU refuses what a GPU refuses; in a process of its own, which it takes for good."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.child import Child, Failed
from tests.gpu.simulated.world import ENVIRONMENT

pytestmark = pytest.mark.slow


class Gpu:
    """A process with a simulated GPU, which does what each of these names says."""

    def __init__(self) -> None:
        from tests.gpu.simulated import cuda

        cuda.install()

    def add_both_devices(self) -> None:
        torch.ones(2, device="cuda").add(torch.ones(2))

    def give_numpy_a_gpus_tensor(self) -> None:
        torch.ones(2, device="cuda").numpy()

    def pin_a_gpus_tensor(self) -> None:
        torch.ones(2, device="cuda").pin_memory()

    def facts(self) -> list[object]:
        """Of tensors made, moved, viewed and computed on the device, and a gradient that goes back to the host."""
        host = torch.arange(4.0, requires_grad=True)
        moved = host.to("cuda")
        (moved.view(2, 2).sum(1) * torch.tensor([1.0, 3.0], device="cuda")).sum().backward()
        pinned = torch.empty(4, pin_memory=True).copy_(moved.detach())
        device, kind = str(moved[:2].device), torch.zeros_like(moved).type()
        assert host.grad is not None
        return [
            device,
            kind,
            host.grad.device.type,
            host.grad.tolist(),
            pinned.is_pinned(),
            host.is_pinned(),
        ]

    def resized(self) -> list[float]:
        """The bytes of a storage that is given away and taken back, under a view of it."""
        flat = torch.ones(8, device="cuda")
        storage = flat.untyped_storage()
        before = storage.nbytes()
        storage.resize_(0)
        freed = storage.nbytes()
        storage.resize_(before)
        return [before, freed, flat.fill_(2.0).sum().item()]


def test_it_refuses_and_computes_as_a_gpu_does() -> None:
    with Child("tests.gpu.simulated.test_tensors:Gpu", ENVIRONMENT) as gpu:
        assert gpu.ask("facts") == [
            "cuda:0",
            "torch.cuda.FloatTensor",
            "cpu",
            [1.0, 1.0, 3.0, 3.0],
            True,
            False,
        ]
        assert gpu.ask("resized") == [32, 0, 16]
        with pytest.raises(Failed, match="same device"):
            gpu.ask("add_both_devices")
        for method in ("give_numpy_a_gpus_tensor", "pin_a_gpus_tensor"):
            with pytest.raises(Failed, match="TypeError: can't convert|cannot pin"):
                gpu.ask(method)
