"""Attention of one causal head by the demo, against the closed form in float64. Needs numpy, safetensors and cargo."""
import subprocess, tempfile
from pathlib import Path
import numpy as np
from safetensors.numpy import load_file, save_file

q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 100, 32)).astype(np.float32)
with tempfile.TemporaryDirectory() as folder:
    case, result = f"{folder}/case.safetensors", f"{folder}/result.safetensors"
    save_file({"q": q, "k": k, "v": v}, case, metadata={"op": "continuous_attention", "sink": "zero"})
    demo = ["cargo", "run", "--release", "--example", "demo", "--", "run", "--input", case, "--output", result]
    subprocess.run(demo, check=True, cwd=Path(__file__).parents[2])
    results = load_file(result)

nodes, values = (np.pad(x[0, 0].astype(float), ((1, 0), (0, 0))) for x in (k, v))  # node 0: the sink, zeros
a = q[0, 0].astype(float) @ nodes.T / np.sqrt(32)
phi2 = lambda x: (np.expm1(x) - x) / x**2
w = np.pad(np.tril(np.exp(a[:, :-1]) * phi2(np.diff(a))), ((0, 0), (0, 1)))  # row r sees segments 1 to r + 1
w += np.pad(np.tril(np.exp(a[:, 1:]) * phi2(-np.diff(a))), ((0, 0), (1, 0)))
for name, right in {"out": w @ values / w.sum(1, keepdims=True), "lse": np.log(w.sum(1))}.items():
    print(f"{name}: largest difference {np.abs(results[name][0, 0] - right).max():.1e}")
    np.testing.assert_allclose(results[name][0, 0], right, rtol=1e-5, atol=1e-5)
