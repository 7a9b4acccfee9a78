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

    def on_a_gpus_tensor(self, name: str) -> None:
        getattr(torch.ones(2, device="cuda"), name)(*[torch.ones(2)] * (name == "add"))

    def facts(self) -> list[object]:
        """Of tensors made, moved, viewed and computed on the device, and a gradient that goes back to the host."""
        host = torch.arange(4.0, requires_grad=True)
        moved = host.to("cuda")
        (moved.view(2, 2).sum(1) * torch.tensor([1.0, 3.0], device="cuda")).sum().backward()
        pinned = torch.empty(4, pin_memory=True).copy_(moved.detach())
        grad = host.grad
        assert grad is not None
        places = [str(moved[:2].device), torch.zeros_like(moved).type(), grad.device.type]
        return [*places, grad.tolist(), pinned.is_pinned(), host.is_pinned()]

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
    with Child("tests.gpu.simulated.test_tensors:Gpu", ENVIRONMENT, fresh=True) as gpu:
        assert gpu.ask("facts") == [
            "cuda:0",
            "torch.cuda.FloatTensor",
            "cpu",
            [1.0, 1.0, 3.0, 3.0],
            True,
            False,
        ]
        assert gpu.ask("resized") == [32, 0, 16]
        refused = {"add": "same device", "numpy": "can't convert", "pin_memory": "cannot pin"}
        for name, words in refused.items():
            with pytest.raises(Failed, match=words):
                gpu.ask("on_a_gpus_tensor", name=name)
