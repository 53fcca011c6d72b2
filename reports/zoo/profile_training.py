"""Check and profile the zoo's training on a GPU: kernels against FP64, launches, whole steps.

    PYTHONPATH=.:kernels python reports/zoo/profile_training.py DATA

Compiles in parallel processes, then times one thing at a time. Prints tables.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRATCH = Path(tempfile.gettempdir()) / "quantlab-profile"
ROUNDS = [
    # wy, states, output, dv, dstates, dqk, dwy as (warps, stages, block)
    [(4, 1, 0), (4, 2, 32), (4, 1, 0), (4, 1, 0), (4, 2, 32), (8, 1, 64), (8, 1, 0)],
    [(8, 1, 0), (4, 3, 32), (8, 1, 0), (8, 1, 0), (4, 1, 32), (4, 1, 64), (4, 1, 0)],
    [(4, 2, 0), (4, 2, 64), (4, 2, 0), (4, 2, 0), (4, 2, 64), (8, 1, 32), (8, 2, 0)],
    [(2, 1, 0), (8, 2, 64), (4, 3, 0), (2, 1, 0), (8, 2, 64), (8, 2, 64), (4, 2, 0)],
    [(8, 2, 0), (4, 2, 16), (8, 2, 0), (8, 2, 0), (4, 2, 16), (4, 1, 32), (2, 1, 0)],
    [(8, 1, 0), (4, 4, 64), (2, 1, 0), (4, 3, 0), (4, 3, 32), (8, 3, 32), (8, 3, 0)],
]
NAMES = ["wy", "states", "output", "dv", "dstates", "dqk", "dwy"]
SHAPES = {"gdn": (2, 4, 128, 128, True), "mamba2": (2, 8, 128, 64, False)}


def say(*words):
    """Print at once."""
    print(*words, flush=True)  # noqa: T201


def set_round(i):
    """Take the launches of one round."""
    from quantlab_kernels import chunk_train

    for name, (warps, stages, block) in zip(NAMES, ROUNDS[i], strict=True):
        chunk_train.LAUNCH[name] = chunk_train.Launch(warps=warps, stages=stages, block=block)


def inputs(kind, rows, steps, seed=0):
    """Draw op inputs of a model's shape."""
    import torch

    hk, h, dk, dv, delta = SHAPES[kind]
    gen = torch.Generator("cuda").manual_seed(seed)
    kw = {"generator": gen, "device": "cuda"}
    q, k = (torch.randn(rows, steps, hk, dk, **kw) for _ in range(2))
    k = k + torch.randn(1, 1, hk, dk, **kw)
    if delta:
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    else:
        k = k * 0.3
    v = torch.randn(rows, steps, h, dv, **kw)
    g = -(10.0 ** (torch.rand(rows, steps, h, **kw) * 3 - 3.5))
    beta = torch.rand(rows, steps, h, **kw) if delta else None
    out = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    return [*out, g.requires_grad_(), None if beta is None else beta.requires_grad_()]


def gradients(fn, args, do):
    """Run forward and backward: output and gradients."""
    out = fn(*args)
    out.backward(do.to(out.dtype))
    return [out.detach()] + [None if x is None else x.grad for x in args]


def check(i):
    """Errors of one round of launches against the sequential recurrence in FP64."""
    import torch

    from quantlab.models.zoo.scan import sequential_scan
    from quantlab_kernels.chunk_train import chunk_scan

    set_round(i)
    for kind in SHAPES:
        args = inputs(kind, 2, 1024)
        do = torch.randn(2, 1024, *args[2].shape[2:], device="cuda").bfloat16()
        wide = [None if x is None else x.detach().double().requires_grad_() for x in args]
        want = gradients(sequential_scan, wide, do)
        try:
            got = gradients(chunk_scan, args, do)
        except Exception as error:  # a launch that does not fit is a result of the sweep
            say(f"round {i} {kind}: {type(error).__name__} {str(error)[:150]}")
            continue
        errs = [
            f"{n}={((a.double() - b).norm() / b.norm()).item():.1e}"
            for n, a, b in zip(("o", "q", "k", "v", "g", "beta"), got, want, strict=True)
            if b is not None
        ]
        say(f"round {i} {kind}: {' '.join(errs)}")


def conv_check():
    """Errors of the convolution against torch in FP64."""
    import torch

    from quantlab.models.zoo.ops import torch_conv_silu
    from quantlab_kernels.chunk_train_conv import conv_silu

    gen = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(4096, 1024, device="cuda", generator=gen).bfloat16()
    w = torch.randn(1024, 4, device="cuda", generator=gen)
    b = torch.randn(1024, device="cuda", generator=gen)
    for kw, bias in (
        ({"sizes": (256, 256, 512), "scales": (0.088, 1.0, None)}, None),
        ({"sizes": (512, 256, 256), "scales": (None, None, None)}, b),
    ):
        res = []
        for fn, dtype in ((conv_silu, None), (torch_conv_silu, torch.float64)):
            leaves = [
                None if a is None else a.detach().to(dtype or a.dtype).requires_grad_()
                for a in (x, w, bias)
            ]
            outs = fn(*leaves, steps=1024, head=128, **kw)
            gen2 = torch.Generator("cuda").manual_seed(1)
            sum(
                (o.double() * torch.randn(o.shape, device="cuda", generator=gen2)).sum()
                for o in outs
            ).backward()
            res.append([*outs] + [a.grad for a in leaves if a is not None])
        say(
            "conv",
            [
                f"{((a.double() - c).norm() / c.norm()).item():.1e}"
                for a, c in zip(*res, strict=True)
            ],
        )


def kernel_times():
    """Device time of every kernel, per round, at training shapes."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from quantlab_kernels.chunk_train import chunk_scan

    for kind in SHAPES:
        for rows, steps in ((32, 4096), (1, 131072)):
            args = inputs(kind, rows, steps)
            do = torch.randn(rows, steps, *args[2].shape[2:], device="cuda").bfloat16()
            table = {n: [] for n in NAMES}
            for i in range(len(ROUNDS)):
                set_round(i)
                try:
                    gradients(chunk_scan, args, do)
                    torch.cuda.synchronize()
                    with profile(activities=[ProfilerActivity.CUDA]) as prof:
                        for _ in range(3):
                            gradients(chunk_scan, args, do)
                        torch.cuda.synchronize()
                except Exception as error:
                    say(f"times round {i} {kind}: {type(error).__name__}")
                    for n in NAMES:
                        table[n].append("-")
                    continue
                by = {e.key: e.device_time_total / 3 for e in prof.key_averages()}
                for n in NAMES:
                    table[n].append(f"{by.get(n + '_kernel', 0):.0f}")
            for n in NAMES:
                say(f"us {kind} {rows}x{steps} {n:8s}", " ".join(f"{t:>7s}" for t in table[n]))


def model(name, data, flags):
    """Compile, wait for our turn, then time and profile steps of one model."""
    import logging

    import torch
    from torch.profiler import ProfilerActivity, profile

    from quantlab.models.zoo import ZOO, corpus, train
    from quantlab.models.zoo.evaluate import evaluate

    logging.basicConfig(level=logging.INFO)
    begun = time.monotonic()
    books = corpus.load_corpus(Path(data))
    say(name, f"corpus {time.monotonic() - begun:.1f} s")
    out = SCRATCH / "profile" / name
    budget = train.Budget(tokens=131_072)
    run = train.Run(ZOO[name], books, out, torch.device("cuda"), budget, begun=begun)
    run.loop()
    say(name, f"first step after {time.monotonic() - begun:.1f} s")
    (flags / f"ready-{name}").touch()
    while not (flags / f"go-{name}").exists():
        time.sleep(0.05)
    for phase in run.hyper.phases:
        for _ in range(2):
            run._one(phase, 0.01)
        torch.cuda.synchronize()
        t, n = time.monotonic(), 8
        for _ in range(n):
            run._one(phase, 0.01)
        launched = time.monotonic() - t
        torch.cuda.synchronize()
        dt = (time.monotonic() - t) / n
        size = phase.rows * phase.length
        say(
            f"{name} {phase.rows}x{phase.length}: {dt * 1e3:.1f} ms/step, "
            f"{size / dt / 1e6:.3f} M tokens/s, host {launched / n * 1e3:.1f} ms, "
            f"peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB"
        )
    phase = run.hyper.phases[0]
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(2):
            run._one(phase, 0.01)
        torch.cuda.synchronize()
    events = sorted(prof.key_averages(), key=lambda e: -e.device_time_total)
    total = sum(e.device_time_total for e in events) / 2e3
    say(f"{name} device total {total:.1f} ms/step over {sum(e.count for e in events) // 2} kernels")
    for e in events[:32]:
        say(f"{e.device_time_total / 2e3:8.2f} ms {e.count // 2:5d} x  {e.key[:110]}")
    again = train.Budget(seconds=18.0)
    run2 = train.Run(ZOO[name], books, out, torch.device("cuda"), again, begun=time.monotonic())
    run2.forward = run.forward
    train.VALIDATE_EVERY = 5.0
    train.LOG_EVERY = 25
    run2.loop()
    run2.load(out / "stable.pt")
    t = time.monotonic()
    run2.finish(evaluate(run2.forward, run2.rounded(), books.test[:1]))
    say(f"{name} evaluation of one book and saving {time.monotonic() - t:.1f} s")
    say((out / "card.md").read_text())
    (flags / f"done-{name}").touch()


def main():
    """Run everything in order."""
    data = sys.argv[1]
    flags = SCRATCH / "flags"
    flags.mkdir(exist_ok=True)
    me = [sys.executable, __file__]
    begun = time.monotonic()
    models = {n: subprocess.Popen([*me, data, "model", n]) for n in ("tiny-gdn", "tiny-mamba2")}
    rounds = [subprocess.Popen([*me, data, "check", str(i)]) for i in range(len(ROUNDS))]
    for p in rounds:
        p.wait()
    say(f"== rounds checked after {time.monotonic() - begun:.0f} s")
    for n, p in models.items():
        while p.poll() is None and not (flags / f"ready-{n}").exists():
            time.sleep(0.1)
    say(f"== compiled after {time.monotonic() - begun:.0f} s")
    for n, p in models.items():
        (flags / f"go-{n}").touch()
        p.wait()
    say(f"== models done after {time.monotonic() - begun:.0f} s")
    subprocess.run([*me, data, "times", "0"], check=False)
    say(f"== all after {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(SCRATCH / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(SCRATCH / "triton"))
    if len(sys.argv) == 2:
        main()
    elif sys.argv[2] == "check":
        if sys.argv[3] == "0":
            conv_check()
        check(int(sys.argv[3]))
    elif sys.argv[2] == "times":
        kernel_times()
    else:
        model(sys.argv[3], sys.argv[1], SCRATCH / "flags")
