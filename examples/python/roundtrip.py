"""Attention of one causal head by the demo, against the closed form in float64. Needs numpy, safetensors and cargo."""
import subprocess, tempfile
from pathlib import Path
import numpy as np
from safetensors.numpy import load_file, save_file

random = np.random.default_rng(0)
q, k, v = (random.standard_normal((1, 1, 100, 32)).astype(np.float32) for _ in range(3))
with tempfile.TemporaryDirectory() as folder:
    case, result = f"{folder}/case.safetensors", f"{folder}/result.safetensors"
    save_file({"q": q, "k": k, "v": v}, case, metadata={"op": "continuous_attention", "sink": "zero"})
    demo = "cargo run --release --example demo -- run --input".split()
    subprocess.run([*demo, case, "--output", result], check=True, cwd=Path(__file__).parents[2])
    results = load_file(result)

nodes, values = (np.pad(x[0, 0].astype(float), ((1, 0), (0, 0))) for x in (k, v))  # node 0: the sink, zeros
a = q[0, 0].astype(float) @ nodes.T / np.sqrt(32)
phi2 = lambda x: (np.expm1(x) - x) / x**2
step = np.diff(a)
w = np.pad(np.tril(np.exp(a[:, :-1]) * phi2(step)), ((0, 0), (0, 1)))  # row r sees segments 1 to r + 1
w += np.pad(np.tril(np.exp(a[:, 1:]) * phi2(-step)), ((0, 0), (1, 0)))
reference = {"out": w @ values / w.sum(1, keepdims=True), "lse": np.log(w.sum(1))}
for name, tensor in results.items():
    print(name, tensor.shape, "largest difference", np.abs(tensor[0, 0] - reference[name]).max())
