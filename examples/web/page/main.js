// Wires the page: controls in, computations one after another, charts and tables out.

import { create } from "./continuous_attention.js";
import { draw } from "./chart.js";
import { predict, sweep, BETA, SCALES } from "./memory.js";
import { co2, own, thin, wave } from "./series.js";
import { points, smooth } from "./smoothing.js";

const $ = (id) => document.getElementById(id);

/** What is to be computed again, in this order. */
const waiting = new Set();
/** What the last computations gave; charts are drawn from it whenever the window changes its size. */
const state = { engine: null, co2: null, series: null, samples: null, smoothing: null, prediction: null, sweep: null };

const number = (value, digits = 3) => String(Number(value.toPrecision(digits)));

/** Bandwidth in the series' own time, from 0.3 % to 20 % of its length. */
function bandwidth() {
  const { times } = state.series;
  return (times.at(-1) - times[0]) * 0.003 * (0.2 / 0.003) ** Number($("bandwidth").value);
}

const scale = () => 2 ** Number($("scale").value);

const jobs = {
  series() {
    const choice = $("series").value;
    $("own").hidden = choice !== "own";
    state.series = choice === "co2" ? state.co2 : choice === "wave" ? wave() : own($("numbers").value);
    drawn.show();
  },
  sampling() {
    state.samples = thin(state.series, $("sampling").value, Number($("kept").value) / 100);
  },
  async smoothing() {
    const options = { bandwidth: bandwidth(), sink: $("sink").value, row: Number($("row").value) };
    state.smoothing = await smooth(state.engine, state.series, state.samples, options);
  },
  async prediction() {
    state.prediction = await predict(state.engine, state.series, scale());
  },
  async sweep() {
    state.sweep = await sweep(state.engine, state.series);
  },
};

/** What has to be computed again when a control changes. */
const CHANGES = {
  series: ["series", "sampling", "smoothing", "prediction", "sweep"],
  numbers: ["series", "sampling", "smoothing", "prediction", "sweep"],
  sampling: ["sampling", "smoothing"],
  kept: ["sampling", "smoothing"],
  bandwidth: ["smoothing"],
  sink: ["smoothing"],
  row: ["smoothing"],
  scale: ["prediction"],
};

let running = false;

/** Computes until nothing waits; changes made meanwhile are taken up when the current job is done. */
async function compute(names) {
  for (const name of names) waiting.add(name);
  if (running) return;
  running = true;
  document.documentElement.dataset.state = "busy";
  $("status").textContent = "Computing…";
  const start = performance.now();
  let failure = null;
  while (waiting.size) {
    const name = Object.keys(jobs).find((name) => waiting.has(name));
    waiting.delete(name);
    try {
      await jobs[name]();
      show();
    } catch (error) {
      // Without a series nothing else can be computed.
      waiting.clear();
      failure = error;
    }
  }
  $("error").hidden = !failure;
  $("error").textContent = failure?.message ?? "";
  const adapter = state.engine.adapter;
  $("status").textContent = failure
    ? "Nothing computed."
    : `Computed in ${Math.round(performance.now() - start)} ms${adapter ? ` on ${adapter}` : ""}.`;
  document.documentElement.dataset.state = failure ? "failed" : "ready";
  running = false;
}

/** Charts, tables and the numbers beside the controls, from what there is. */
function show() {
  const { series, samples, smoothing, prediction, sweep } = state;
  $("kept-value").textContent = `${$("kept").value} %${samples ? `, ${samples.times.length} of ${series.times.length} samples` : ""}`;
  $("bandwidth-value").textContent = `${number(bandwidth())} ${series.clock === "year" ? "years" : ""}`;
  $("row-value").textContent = number(points(series)[Number($("row").value)], 6);
  const step = BETA * scale() ** 2;
  $("scale-value").textContent = `${number(scale())}, βλ = ${number(step)}`;
  const unit = series.unit ? ` ${series.unit}` : "";
  if (smoothing) showSmoothing(series, samples, smoothing, unit);
  if (prediction) showPrediction(series, prediction, unit);
  if (sweep) {
    draw($("errors"), $("errors-legend"), {
      layers: [
        ...errorLayers("EFLA (exact)", sweep.exact, "one"),
        ...errorLayers("DeltaNet (Euler)", sweep.euler, "two dashed"),
      ],
      x: { log: true, ticks: SCALES.filter((scale) => Number.isInteger(Math.log2(scale))), name: "key scale" },
      y: { name: `error of prediction${unit}`, from: 0 },
      alt: `Error of one-step prediction by key scale. EFLA: ${words(sweep.exact)}. DeltaNet: ${words(sweep.euler)}.`,
    });
  }
  if (prediction && sweep) table($("memory-checks"), [...prediction.checks, ...sweep.checks]);
}

function showSmoothing(series, samples, smoothing, unit) {
  const { times, ordinary, continuous, full, ordinaryError, continuousError } = smoothing;
  draw($("curves"), $("curves-legend"), {
    layers: [
      { kind: "dots", x: samples.times, y: samples.values, style: "three", label: "samples", radius: 1.5 },
      { kind: "curve", x: times, y: full, style: "three dashed", label: "continuous, every sample" },
      { kind: "curve", x: times, y: ordinary, style: "two", label: `ordinary, off by ${number(ordinaryError)}${unit} rms` },
      { kind: "curve", x: times, y: continuous, style: "one", label: `continuous, off by ${number(continuousError)}${unit} rms` },
    ],
    x: { name: series.clock },
    y: { name: series.unit },
    mark: times[Number($("row").value)],
    alt: `Smoothed curves. From ${samples.times.length} samples ordinary attention is off by ${number(ordinaryError)}${unit}, continuous attention by ${number(continuousError)}${unit}.`,
  });
  const time = times[Number($("row").value)];
  const reach = 4 * bandwidth();
  const near = [...samples.times.keys()].filter((i) => Math.abs(samples.times[i] - time) <= reach);
  const at = near.map((i) => samples.times[i]);
  const sum = smoothing.continuousWeights.reduce((sum, weight) => sum + weight, 0);
  const rest = 1 - sum > 1e-4 ? `, ${number(100 * (1 - sum), 2)} % to the sink` : "";
  draw($("weights"), $("weights-legend"), {
    layers: [
      { kind: "stems", x: at, y: near.map((i) => smoothing.ordinaryWeights[i]), style: "two", label: "ordinary", shift: -1 },
      { kind: "stems", x: at, y: near.map((i) => smoothing.continuousWeights[i]), style: "one", label: `continuous${rest}`, shift: 1 },
    ],
    x: { from: time - reach, to: time + reach, name: series.clock },
    y: { from: 0, name: "weight" },
    mark: time,
    alt: `Weights of ${near.length} samples at time ${number(time, 6)}: ordinary at most ${number(Math.max(...smoothing.ordinaryWeights))}, continuous at most ${number(Math.max(...smoothing.continuousWeights))}.`,
  });
  table($("smoothing-checks"), smoothing.checks);
}

function showPrediction(series, { times, exact, euler }, unit) {
  const [low, high] = [Math.min(...series.values), Math.max(...series.values)];
  const room = (high - low) / 5;
  const said = ({ error, diverged, predictions }) =>
    diverged ? `diverged at reading ${predictions.length}` : `off by ${number(error)}${unit} rms`;
  draw($("predictions"), $("predictions-legend"), {
    layers: [
      { kind: "dots", x: series.times, y: series.values, style: "three", label: "readings", radius: 1.5 },
      { kind: "curve", x: times, y: euler.predictions, style: "two", label: `DeltaNet (Euler), ${said(euler)}` },
      { kind: "curve", x: times, y: exact.predictions, style: "one", label: `EFLA (exact), ${said(exact)}` },
    ],
    x: { name: series.clock },
    y: { name: series.unit, from: low - room, to: high + room },
    alt: `One-step predictions at key scale ${number(scale())}. EFLA ${said(exact)}. DeltaNet ${said(euler)}.`,
  });
}

/** A curve, and crosses at the top where it diverged. */
function errorLayers(label, errors, style) {
  const top = Math.max(...state.sweep.exact, ...state.sweep.euler) * 1.1;
  const diverged = errors.map((error) => (error === null ? top : NaN));
  const note = errors.includes(null) ? `${label}, × diverged` : label;
  return [
    { kind: "curve", x: SCALES, y: errors.map((error) => error ?? NaN), style, label: note },
    { kind: "dots", x: SCALES, y: errors.map((error) => error ?? NaN), style },
    { kind: "crosses", x: SCALES, y: diverged, style: style.split(" ")[0] },
  ];
}

const words = (errors) =>
  errors.map((error, i) => `${error === null ? "diverged" : number(error)} at ${SCALES[i]}`).join(", ");

function table(table, checks) {
  const head = ["", "largest difference", "allowed", "GPU, ms", "float64 in wasm, ms"];
  const row = (cells, tag) => {
    const made = document.createElement("tr");
    for (const cell of cells) {
      const made_cell = document.createElement(tag);
      if (tag === "th") made_cell.scope = "col";
      made_cell.textContent = cell;
      made.append(made_cell);
    }
    return made;
  };
  const rows = checks.map((check) => {
    const milliseconds = (time) => (time < 10 ? time.toFixed(1) : String(Math.round(time)));
    const { name, max, allowed, gpu, reference } = check;
    const made = row([name, max.toExponential(1), allowed.toExponential(1), milliseconds(gpu), milliseconds(reference)], "td");
    if (!check.passed) {
      made.className = "failed";
      made.firstChild.textContent += `: ${check.failure}`;
    }
    Object.assign(made.dataset, { passed: check.passed, max, allowed });
    return made;
  });
  const [thead, tbody] = [document.createElement("thead"), document.createElement("tbody")];
  thead.append(row(head, "th"));
  tbody.append(...rows);
  table.replaceChildren(thead, tbody);
}

/** The drawing surface: 120 values between −1 and 1 over 10 units of time, which go to the field of numbers. */
const drawn = {
  values: [],
  last: null,
  show() {
    if ($("own").hidden) return;
    const { times, values } = state.series;
    draw($("draw"), document.createElement("div"), {
      layers: [{ kind: "curve", x: times, y: values, style: "one" }],
      alt: "",
    });
  },
  point(event) {
    const { left, top, width, height } = $("draw").getBoundingClientRect();
    const index = Math.round(((event.clientX - left) / width) * 119);
    const value = 1 - (2 * (event.clientY - top)) / height;
    return [Math.min(119, Math.max(0, index)), Math.min(1, Math.max(-1, value))];
  },
  /** Fills in what lies between the last point and this one. */
  to([index, value]) {
    const [from, before] = this.last ?? [index, value];
    for (let i = Math.min(from, index); i <= Math.max(from, index); i++) {
      this.values[i] = from === index ? value : before + ((value - before) * (i - from)) / (index - from);
    }
    this.last = [index, value];
    const seen = [...this.values.keys()].filter((i) => this.values[i] !== undefined);
    draw($("draw"), document.createElement("div"), {
      layers: [{ kind: "curve", x: seen, y: seen.map((i) => this.values[i]), style: "one" }],
      x: { from: 0, to: 119, ticks: [] },
      y: { from: -1, to: 1 },
      alt: "",
    });
  },
  end() {
    this.last = null;
    const seen = [...this.values.keys()].filter((i) => this.values[i] !== undefined);
    $("numbers").value = seen.map((i) => `${number(i / 12)}, ${number(this.values[i])}`).join("\n");
    compute(CHANGES.numbers);
  },
};

function listen() {
  for (const [id, names] of Object.entries(CHANGES)) {
    // A slider tells of every step, a select and the field of numbers when they are done.
    const event = $(id).type === "range" ? "input" : "change";
    $(id).addEventListener(event, () => compute(names));
  }
  $("file").addEventListener("change", async () => {
    const [file] = $("file").files;
    if (!file) return;
    $("numbers").value = await file.text();
    compute(CHANGES.numbers);
  });
  $("draw").addEventListener("pointerdown", (event) => {
    $("draw").setPointerCapture(event.pointerId);
    drawn.values = [];
    drawn.to(drawn.point(event));
  });
  $("draw").addEventListener("pointermove", (event) => drawn.last && drawn.to(drawn.point(event)));
  for (const type of ["pointerup", "pointercancel"]) $("draw").addEventListener(type, () => drawn.last && drawn.end());
  let width = innerWidth;
  addEventListener("resize", () => {
    if (width === innerWidth || !state.series) return;
    width = innerWidth;
    drawn.show();
    show();
  });
}

async function main() {
  if (!navigator.gpu) throw Object.assign(new Error("it has no navigator.gpu."), { kind: "no adapter" });
  state.engine = await create();
  state.co2 = await co2();
  $("numbers").value = Array.from({ length: 40 }, (_, i) => `${number(i / 4)}, ${number(Math.sin(i / 3) + i / 30)}`).join("\n");
  $("main").hidden = false;
  listen();
  await compute(CHANGES.series);
}

main().catch((error) => {
  document.documentElement.dataset.state = "failed";
  $("status").textContent = "";
  if (error.kind === "no adapter") {
    $("missing").hidden = false;
    $("reason").textContent = error.message;
  } else {
    $("main").hidden = false;
    $("error").hidden = false;
    $("error").textContent = error.message;
  }
});
