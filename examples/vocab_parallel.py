"""A head split by vocabulary over the ranks, compared with the whole head on one rank.

    torchrun --nproc-per-node 2 -m examples.vocab_parallel            # V = 151936, H = 896, 1024 tokens
    torchrun --nproc-per-node 2 -m examples.vocab_parallel --small    # V = 3001, H = 64, 64 tokens

It uses GPUs if there is one for each rank, else the CPU (about 20 seconds on two cores, a few with --small). It prints
the error and the time of both. The scaling over GPUs was not measured yet.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist

from grpo_fused import fused_linear_grpo_loss


def main() -> None:
    """Run on every rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="V = 3001 instead of 151936")
    small = parser.parse_args().small
    on_gpus = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    B, T, H, V = (4, 16, 64, 3001) if small else (8, 128, 896, 151936)
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, T, H, generator=g).bfloat16().to(device)
    weight = (torch.randn(V, H, generator=g) * 4 / H**0.5).bfloat16().to(device)
    ids = torch.randint(0, V, (B, T), generator=g).to(device)
    advantages = torch.randn(B, generator=g).to(device)

    def timed(weight: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[float, torch.Tensor, torch.Tensor, float]:
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        seconds = 0.0
        for _ in range(2):  # the first call includes compilation and allocation
            for leaf in leaves:
                leaf.grad = None
            dist.barrier()
            start = time.perf_counter()
            loss = fused_linear_grpo_loss(*leaves, ids, advantages, process_group=group).loss
            loss.backward()
            if on_gpus:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        dhidden, dweight = leaves[0].grad, leaves[1].grad
        assert dhidden is not None
        assert dweight is not None
        return loss.item(), dhidden, dweight, seconds

    first, last = V * rank // world, V * (rank + 1) // world
    loss, dhidden, dweight, seconds = timed(weight[first:last], dist.group.WORLD)
    want, whole_dhidden, whole_dweight, alone = timed(weight, None)

    def error(got: torch.Tensor, exact: torch.Tensor) -> float:
        return float((got.double() - exact.double()).norm() / exact.double().norm())

    print(
        f"rank {rank} of {world} on {device}: loss {loss:.6f} (whole head {want:.6f}), relative errors dH "
        f"{error(dhidden, whole_dhidden):.1e}, dW {error(dweight, whole_dweight[first:last]):.1e}; "
        f"{1e3 * seconds:.1f} ms with a slice, {1e3 * alone:.1f} ms with the whole head",
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
