// Wires the page: controls in, computations one after another, charts and tables out.

import { create } from "./continuous_attention.js";
import { draw, MARGIN } from "./chart.js";
import { predict, sweep, BETA, SCALES } from "./memory.js";
import { co2, own, thin, wave } from "./series.js";
import { points, smooth, weigh } from "./smoothing.js";

const $ = (id) => document.getElementById(id);

/** What is to be computed again, in this order. */
const waiting = new Set();
/** What the last computations gave; charts are drawn from it whenever the window changes its size. */
const state = {};

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
    const options = { bandwidth: bandwidth(), sink: $("sink").value };
    state.smoothing = await smooth(state.engine, state.series, state.samples, options);
  },
  async weights() {
    const options = { bandwidth: bandwidth(), sink: $("sink").value, row: Number($("row").value) };
    state.weights = await weigh(state.engine, state.series, state.samples, options);
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
  series: Object.keys(jobs),
  numbers: Object.keys(jobs),
  sampling: ["sampling", "smoothing", "weights"],
  kept: ["sampling", "smoothing", "weights"],
  bandwidth: ["smoothing", "weights"],
  sink: ["smoothing", "weights"],
  row: ["weights"],
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
  const { adapter } = state.engine;
  $("status").textContent = failure
    ? "Nothing computed."
    : `Computed in ${Math.round(performance.now() - start)} ms${adapter ? ` on ${adapter}` : ""}.`;
  document.documentElement.dataset.state = failure ? "failed" : "ready";
  running = false;
}

/** What a slider stands at, in its own unit. */
function tell(id, value) {
  $(`${id}-value`).textContent = value;
  $(id).setAttribute("aria-valuetext", value);
}

/** Charts, tables and the numbers beside the controls, from what there is. */
function show() {
  const { series, samples, smoothing, weights, prediction, sweep } = state;
  const of = samples ? `, ${samples.times.length} of ${series.times.length} samples` : "";
  tell("kept", `${$("kept").value} %${of}`);
  tell("bandwidth", `${number(bandwidth())}${series.clock === "year" ? " years" : ""}`);
  tell("row", number(points(series)[Number($("row").value)], 6));
  tell("scale", `${number(scale())}, βλ = ${number(BETA * scale() ** 2)}`);
  const unit = series.unit ? ` ${series.unit}` : "";
  if (smoothing) showSmoothing(series, samples, smoothing, unit);
  if (weights) showWeights(series, samples, weights);
  if (smoothing && weights) table($("smoothing-checks"), [...smoothing.checks, ...weights.checks]);
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
  const { times, full } = smoothing;
  const ordinary = `ordinary, off by ${number(smoothing.ordinaryError)}${unit} rms`;
  const continuous = `continuous, off by ${number(smoothing.continuousError)}${unit} rms`;
  draw($("curves"), $("curves-legend"), {
    layers: [
      { kind: "dots", x: samples.times, y: samples.values, style: "three", label: "samples", radius: 1.5 },
      { kind: "curve", x: times, y: full, style: "three dashed", label: "continuous, every sample" },
      { kind: "curve", x: times, y: smoothing.ordinary, style: "two", label: ordinary },
      { kind: "curve", x: times, y: smoothing.continuous, style: "one", label: continuous },
    ],
    x: { name: series.clock },
    y: { name: series.unit },
    mark: times[Number($("row").value)],
    alt: `Curves through ${samples.times.length} samples: ${ordinary}; ${continuous}.`,
  });
}

function showWeights(series, samples, { time, ordinary, continuous }) {
  const reach = 4 * bandwidth();
  const near = [...samples.times.keys()].filter((i) => Math.abs(samples.times[i] - time) <= reach);
  const x = near.map((i) => samples.times[i]);
  const stems = (weights, style, label, shift) => {
    return { kind: "stems", x, y: near.map((i) => weights[i]), style, label, shift };
  };
  const sink = 1 - continuous.reduce((sum, weight) => sum + weight, 0);
  const rest = sink > 1e-4 ? `, ${number(100 * sink, 2)} % to the sink` : "";
  const most = `ordinary at most ${number(Math.max(...ordinary))}, continuous ${number(Math.max(...continuous))}`;
  draw($("weights"), $("weights-legend"), {
    layers: [stems(ordinary, "two", "ordinary", -1), stems(continuous, "one", `continuous${rest}`, 1)],
    x: { from: time - reach, to: time + reach, name: series.clock },
    y: { from: 0, name: "weight" },
    mark: time,
    alt: `Weights of ${near.length} samples at time ${number(time, 6)}: ${most}${rest}.`,
  });
}

function showPrediction(series, { times, exact, euler }, unit) {
  const [low, high] = [Math.min(...series.values), Math.max(...series.values)];
  const room = (high - low) / 5;
  const said = ({ error, diverged, predictions }) =>
    diverged ? `diverged at reading ${predictions.length}` : `off by ${number(error)}${unit} rms`;
  draw($("predictions"), $("predictions-legend"), {
    layers: [
      { kind: "dots", x: series.times, y: series.values, style: "three", label: "readings", radius: 1.5 },
      { kind: "curve", x: times, y: euler.predictions, style: "two thin", label: `DeltaNet (Euler), ${said(euler)}` },
      { kind: "curve", x: times, y: exact.predictions, style: "one", label: `EFLA (exact), ${said(exact)}` },
    ],
    x: { name: series.clock },
    y: { name: series.unit, from: low - room, to: high + room },
    alt: `One-step predictions at key scale ${number(scale())}. EFLA ${said(exact)}. DeltaNet ${said(euler)}.`,
  });
}

/** A curve, and crosses at the top where it leaves the chart, whose height is that of EFLA's errors. */
function errorLayers(label, errors, style) {
  const top = 1.5 * Math.max(...state.sweep.exact);
  const within = errors.map((error) => (error === null || error > top ? NaN : error));
  const beyond = within.map((error) => (Number.isNaN(error) ? top : NaN));
  const note = within.some(Number.isNaN) ? `${label}, × diverged or beyond the chart` : label;
  return [
    { kind: "curve", x: SCALES, y: within, style, label: note },
    { kind: "dots", x: SCALES, y: within, style },
    { kind: "crosses", x: SCALES, y: beyond, style: style.split(" ")[0] },
  ];
}

const words = (errors) =>
  errors.map((error, i) => `${error === null ? "diverged" : number(error)} at ${SCALES[i]}`).join(", ");

function table(table, checks) {
  const head = ["", "largest difference", "allowed", "GPU, ms", "float64 in wasm, ms"];
  const row = (cells, tag) => {
    const made = document.createElement("tr");
    for (const cell of cells) {
      const field = document.createElement(tag);
      if (tag === "th") field.scope = "col";
      field.textContent = cell;
      made.append(field);
    }
    return made;
  };
  const rows = checks.map((check) => {
    const milliseconds = (time) => (time < 10 ? time.toFixed(1) : String(Math.round(time)));
    const { name, max, allowed } = check;
    const times = [check.gpu, check.reference].map(milliseconds);
    const made = row([name, max.toExponential(1), allowed.toExponential(1), ...times], "td");
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

/** The drawing surface: values between −1 and 1 at `STEPS` + 1 times from 0 to `SPAN`, which go to the field of numbers. */
const STEPS = 120;
const SPAN = 10;
const drawn = {
  values: [],
  last: null,
  show() {
    if ($("own").hidden) return;
    const { times, values } = state.series;
    const fits = times[0] >= 0 && times.at(-1) <= SPAN && values.every((value) => Math.abs(value) <= 1);
    this.curve(times, values, fits ? [{ from: 0, to: SPAN }, { from: -1, to: 1 }] : []);
  },
  curve(x, y, [across, up]) {
    const layers = [{ kind: "curve", x, y, style: "one" }];
    draw($("draw"), document.createElement("div"), { layers, x: across, y: up, alt: "" });
  },
  /** The step and the value under the pointer. */
  point(event) {
    const { left, top, width, height } = $("draw").getBoundingClientRect();
    const across = (event.clientX - left - MARGIN.left) / (width - MARGIN.left - MARGIN.right);
    const down = (event.clientY - top - MARGIN.top) / (height - MARGIN.top - MARGIN.bottom);
    const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
    return [clamp(Math.round(across * STEPS), 0, STEPS), clamp(1 - 2 * down, -1, 1)];
  },
  /** Fills in what lies between the last point and this one. */
  to([step, value]) {
    const [from, before] = this.last ?? [step, value];
    for (let i = Math.min(from, step); i <= Math.max(from, step); i++) {
      this.values[i] = from === step ? value : before + ((value - before) * (i - from)) / (step - from);
    }
    this.last = [step, value];
    const { x, y } = this.seen();
    this.curve(x, y, [{ from: 0, to: SPAN }, { from: -1, to: 1 }]);
  },
  seen() {
    const steps = [...this.values.keys()].filter((i) => this.values[i] !== undefined);
    return { x: steps.map((i) => (i * SPAN) / STEPS), y: steps.map((i) => this.values[i]) };
  },
  end() {
    this.last = null;
    const { x, y } = this.seen();
    $("numbers").value = x.map((time, i) => `${number(time)}, ${number(y[i])}`).join("\n");
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
  const bumps = (i) => `${number(i / 4)}, ${number(0.7 * Math.sin(i / 3) + i / 150)}`;
  $("numbers").value = Array.from({ length: 40 }, (_, i) => bumps(i)).join("\n");
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
