// Line charts in SVG, redrawn at the size they have on screen so that text stays readable on a phone.

const SVG = "http://www.w3.org/2000/svg";
/** Around the plot; what is drawn by hand has to know it, too. */
export const MARGIN = { left: 48, right: 14, top: 22, bottom: 34 };

function element(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/** About `count` round numbers within [from, to]. */
function ticks(from, to, count) {
  const raw = (to - from) / count;
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * size).find((step) => step >= raw);
  const first = Math.ceil(from / step);
  const number = Math.floor(to / step + 1e-9) - first + 1;
  return Array.from({ length: number }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

/**
 * Draws into `svg`; layers are { kind: "curve" | "dots" | "stems" | "crosses", x, y, style, label }. `x` and `y` may fix
 * the ends of a range, x its ticks and that it is logarithmic; `mark` is a vertical line. `alt` says in words what there
 * is to see.
 */
export function draw(svg, legend, { layers, x = {}, y = {}, mark, alt }) {
  const { width, height } = svg.getBoundingClientRect();
  if (!width) return;
  const finite = (axis) => layers.flatMap((layer) => layer[axis]).filter((value) => Number.isFinite(value));
  const range = (axis, { from, to, log }) => {
    const values = finite(axis);
    let low = from ?? Math.min(...values);
    let high = to ?? Math.max(...values);
    if (low === high) [low, high] = [low - 1, high + 1];
    const map = log ? Math.log2 : (value) => value;
    return { low: map(low), high: map(high), map };
  };
  const [across, up] = [range("x", x), range("y", y)];
  // Nothing lies on the edge, save what was put there.
  const room = (up.high - up.low) / 20;
  if (y.from === undefined) up.low -= room;
  if (y.to === undefined) up.high += room;
  const place = ({ low, high, map }, value, start, end) => start + ((map(value) - low) / (high - low)) * (end - start);
  const left = (value) => place(across, value, MARGIN.left, width - MARGIN.right);
  const top = (value) => place(up, value, height - MARGIN.bottom, MARGIN.top);
  const parts = [];

  const xTicks = x.ticks ?? ticks(across.low, across.high, Math.max(2, Math.floor(width / 90)));
  for (const value of xTicks) {
    const at = left(value);
    parts.push(element("line", { class: "axis", x1: at, x2: at, y1: MARGIN.top, y2: height - MARGIN.bottom }));
    const label = { x: at, y: height - MARGIN.bottom + 15, "text-anchor": "middle" };
    parts.push(element("text", label, value));
  }
  for (const value of ticks(up.low, up.high, Math.max(2, Math.floor(height / 50)))) {
    const at = top(value);
    parts.push(element("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: at, y2: at }));
    parts.push(element("text", { x: MARGIN.left - 6, y: at + 4, "text-anchor": "end" }, value));
  }
  parts.push(element("text", { x: width - MARGIN.right, y: height - 4, "text-anchor": "end" }, x.name ?? ""));
  if (y.name) parts.push(element("text", { x: 4, y: 12 }, y.name));
  if (mark !== undefined) {
    const at = left(mark);
    parts.push(element("line", { class: "mark", x1: at, x2: at, y1: MARGIN.top, y2: height - MARGIN.bottom }));
  }

  // What leaves the frame is cut off.
  const clip = `${svg.id}-frame`;
  const frame = element("clipPath", { id: clip });
  const inner = width - MARGIN.left - MARGIN.right + 12;
  const edge = { x: MARGIN.left - 6, y: MARGIN.top, width: inner, height: height - MARGIN.top - MARGIN.bottom + 1 };
  frame.append(element("rect", edge));
  const group = element("g", { "clip-path": `url(#${clip})` });
  for (const layer of layers) {
    const seen = [...layer.x.keys()].filter((i) => Number.isFinite(layer.y[i]));
    const style = layer.style ?? "";
    if (layer.kind === "curve") {
      const path = seen.map((i, n) => `${n ? "L" : "M"}${left(layer.x[i]).toFixed(1)} ${top(layer.y[i]).toFixed(1)}`);
      group.append(element("path", { class: `curve ${style}`, d: path.join("") }));
    } else if (layer.kind === "stems") {
      const shift = layer.shift ?? 0;
      const line = (i) => {
        const at = (left(layer.x[i]) + shift).toFixed(1);
        return `M${at} ${top(0).toFixed(1)}V${top(layer.y[i]).toFixed(1)}`;
      };
      group.append(element("path", { class: `stem ${style}`, d: seen.map(line).join("") }));
    } else {
      const size = layer.kind === "dots" ? (layer.radius ?? 2.5) : 5;
      for (const i of seen) {
        const [cx, cy] = [left(layer.x[i]).toFixed(1), top(layer.y[i]).toFixed(1)];
        if (layer.kind === "dots") group.append(element("circle", { class: `dot ${style}`, cx, cy, r: size }));
        else {
          const d = `M${cx - size} ${cy - size}l${2 * size} ${2 * size}m0 ${-2 * size}l${-2 * size} ${2 * size}`;
          group.append(element("path", { class: `curve ${style}`, d }));
        }
      }
    }
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-label", alt);
  svg.replaceChildren(frame, ...parts, group);
  legend.replaceChildren(
    ...layers
      .filter((layer) => layer.label)
      .map((layer) => {
        const entry = document.createElement("span");
        entry.className = `${layer.style} ${layer.kind === "dots" ? "dots" : ""}`;
        entry.textContent = layer.label;
        return entry;
      }),
  );
}
