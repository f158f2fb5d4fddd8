"""Attention by PyTorch on the CPU, for comparison: fused ordinary attention, and the closed form of continuous attention
in eager mode, which is what people have without a kernel.

    python3 benches/peers/pytorch.py [--json FILE] [--runs N] [--tokens T] [--heads H] [--dim D]

Causal, B 1, f32, sink of zeros. The closed form is compared with a numerical integral before it is timed, fused ordinary
attention with its definition. Without torch it says so and ends well.
"""

import argparse
import json
import math
import statistics
import time

try:
    import torch
except ImportError:
    torch = None


def closed_form(q, k, v):
    """out = (integral of e^a v) / (integral of e^a) over segments on which a = q.k/sqrt(D) and v are linear.

    With d = a_i - a_(i-1), segment i contributes e^(a_(i-1)) (L v_(i-1) + R v_i), R = integral of s e^(ds) and
    L = integral of (1 - s) e^(ds) over [0, 1].
    """
    tokens, dim = q.shape[-2:]
    node = torch.zeros_like(k[..., :1, :])
    k, v = torch.cat([node, k], -2), torch.cat([node, v], -2)
    logits = q @ k.transpose(-1, -2) / math.sqrt(dim)
    # Row r sees nodes 0 to r + 1.
    rows, nodes = torch.arange(tokens)[:, None], torch.arange(tokens + 1)
    logits = logits.masked_fill(nodes > rows + 1, -math.inf)
    weights = torch.exp(logits - logits.amax(-1, keepdim=True))
    a, b = logits[..., :-1], logits[..., 1:]
    seen = nodes[1:] <= rows + 1
    d = torch.where(seen, b - a, 0.0)
    small = d.abs() < 0.05
    safe = torch.where(small, 1.0, d)
    # From the larger end, so that nothing overflows: e^(-|d|) only.
    e = torch.exp(-safe.abs())
    x = safe.abs()
    near = torch.where(small, 0.0, (x - 1 + e) / (x * x))
    far = torch.where(small, 0.0, (1 - e - x * e) / (x * x))
    y = d.abs()
    near = torch.where(small, 0.5 - y / 6 + y * y / 24 - y**3 / 120, near)
    far = torch.where(small, 0.5 - y / 3 + y * y / 8 - y**3 / 30, far)
    rising = d >= 0
    top = torch.where(rising, weights[..., 1:], weights[..., :-1]) * seen
    right = top * torch.where(rising, near, far)
    left = top * torch.where(rising, far, near)
    total = torch.zeros_like(weights)
    total[..., 1:] += right
    total[..., :-1] += left
    return total @ v / total.sum(-1, keepdim=True)


def integral(q, k, v, steps=400):
    """The same by the midpoint rule in float64, for a few tokens."""
    q, k, v = q.double(), k.double(), v.double()
    node = torch.zeros_like(k[..., :1, :])
    k, v = torch.cat([node, k], -2), torch.cat([node, v], -2)
    s = ((torch.arange(steps, dtype=torch.float64) + 0.5) / steps)[:, None]
    rows = []
    for row in range(q.shape[-2]):
        keys = torch.cat([k[..., i : i + 1, :] * (1 - s) + k[..., i + 1 : i + 2, :] * s for i in range(row + 1)], -2)
        values = torch.cat([v[..., i : i + 1, :] * (1 - s) + v[..., i + 1 : i + 2, :] * s for i in range(row + 1)], -2)
        logits = q[..., row : row + 1, :] @ keys.transpose(-1, -2) / math.sqrt(q.shape[-1])
        rows.append(torch.softmax(logits, -1) @ values)
    return torch.cat(rows, -2)


def definition(q, k, v):
    """Ordinary causal attention, by its formula, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    tokens = q.shape[-2]
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    logits = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf)
    return torch.softmax(logits, -1) @ v


def fused(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def agree(name, got, want, limit):
    difference = ((got.double() - want).abs().max() / want.abs().max()).item()
    if not difference <= limit:
        raise SystemExit(f"{name}: differs by {difference:.1e} of the largest element")
    print(f"{name}: differs by {difference:.1e} of the largest element")


def seconds(work):
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description="Attention by PyTorch on the CPU.")
    parser.add_argument("--json", help="write the results as one flat JSON object")
    parser.add_argument("--runs", type=int, default=30, help="interleaved runs of each [30]")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    args = parser.parse_args()
    if torch is None:
        print("torch is missing, nothing is measured: pip install torch")
        return
    torch.manual_seed(0)
    with torch.no_grad():
        few = [torch.randn(1, 2, 40, 16) for _ in range(3)]
        agree("closed form against the integral", closed_form(*few), integral(*few), 1e-4)
        q, k, v = (torch.randn(1, args.heads, args.tokens, args.dim) for _ in range(3))
        agree("fused attention against its definition", fused(q, k, v), definition(q, k, v), 1e-5)
        sides = {"pytorch_fused": lambda: fused(q, k, v), "pytorch_closed_form": lambda: closed_form(q, k, v)}
        for work in sides.values():
            work()
        times = {name: [] for name in sides}
        for run in range(args.runs):
            order = list(sides) if run % 2 == 0 else list(reversed(sides))
            for name in order:
                times[name].append(1e3 * seconds(sides[name]))
    found = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, H {args.heads}, T {args.tokens}, D {args.dim}")
    for name, samples in times.items():
        found[f"{name}_d{args.dim}_ms"] = statistics.median(samples)
        print(f"  {name:<22}{statistics.median(samples):9.2f} ms   ({min(samples):.2f} to {max(samples):.2f})")
    ratios = [b / a for a, b in zip(times["pytorch_fused"], times["pytorch_closed_form"])]
    key = f"pytorch_closed_form_over_fused_d{args.dim}"
    found[key] = statistics.median(ratios)
    print(f"  {key}: {found[key]:.2f}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
