// The page in a real browser: every control, by pointer and by keyboard, the numbers it shows, and screenshots in
// target/web. `node page.mjs`.

import assert from "node:assert/strict";
import { mkdirSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { launch, open } from "./browser.mjs";
import { serve } from "./server.mjs";

const SHOTS = fileURLToPath(new URL("../../../target/web/", import.meta.url));
const PHONE = { viewport: { width: 390, height: 844 }, deviceScaleFactor: 2, hasTouch: true, isMobile: true };

/** Waits until nothing is being computed, which may take a while in software. */
async function settled(page) {
  await page.waitForFunction(() => ["ready", "failed"].includes(document.documentElement.dataset.state), null, {
    timeout: 180_000,
  });
}

/** Rows of a table of checks, all of which have to pass. */
async function checks(page, id) {
  const rows = await page.locator(`#${id} tbody tr`).evaluateAll((rows) =>
    rows.map((row) => ({ text: row.innerText, ...row.dataset })),
  );
  assert.ok(rows.length >= 4, `${id}: ${rows.length} rows`);
  for (const { text, passed, max, allowed } of rows) {
    assert.equal(passed, "true", text);
    assert.ok(Number(max) <= Number(allowed), text);
    // Two independent computations that agree to the last bit would be one.
    assert.ok(Number(max) > 0, text);
  }
  return rows;
}

const text = (page, id) => page.locator(`#${id}`).innerText();

/** The number behind “ordinary, off by” and the like in a legend. */
async function off(page, id, label) {
  const legend = await text(page, id);
  const match = new RegExp(`${label}[^,]*, off by ([\\d.e-]+)`).exec(legend);
  assert.ok(match, `“${label}” in: ${legend}`);
  return Number(match[1]);
}

/** What a chart shows, to see whether it changed. */
const chart = (page, id) => page.locator(`#${id}`).innerHTML();

const { server, address } = await serve();
const browser = await launch();
const desktop = await open(browser, address, { viewport: { width: 1200, height: 900 } });
const { page } = desktop;

const tests = {
  async "the page computes when it is opened"() {
    await settled(page);
    assert.equal(await page.locator("#error").isVisible(), false, await text(page, "error"));
    assert.equal(await page.locator("#missing").isVisible(), false);
    assert.match(await text(page, "status"), /^Computed in \d+ ms on \S/);
    await checks(page, "smoothing-checks");
    await checks(page, "memory-checks");
    await page.screenshot({ path: `${SHOTS}desktop.png`, fullPage: true });
  },

  async "continuous attention is not misled by dense samples"() {
    const ordinary = await off(page, "curves-legend", "ordinary");
    const continuous = await off(page, "curves-legend", "continuous");
    assert.ok(ordinary > 1 && continuous < 0.5, `${ordinary} ${continuous} ppm`);
  },

  async "EFLA holds where DeltaNet diverges"() {
    const alt = await page.locator("#errors").getAttribute("aria-label");
    assert.match(alt, /DeltaNet: .*\d at 1\.5, diverged at 2, .*diverged at 16\.$/);
    assert.doesNotMatch(alt.split("DeltaNet")[0], /diverged/);
  },

  async "sliders answer to the keyboard"() {
    for (const [id, charts] of Object.entries({
      kept: ["curves", "weights"],
      bandwidth: ["curves", "weights"],
      row: ["weights"],
      scale: ["predictions"],
    })) {
      const before = await Promise.all(charts.map((id) => chart(page, id)));
      const value = await text(page, `${id}-value`);
      await page.locator(`#${id}`).focus();
      for (let i = 0; i < 4; i++) await page.keyboard.press("ArrowRight");
      await settled(page);
      assert.notEqual(await text(page, `${id}-value`), value, id);
      for (const [i, name] of charts.entries()) assert.notEqual(await chart(page, name), before[i], `${id}: ${name}`);
    }
    assert.match(await text(page, "predictions-legend"), /DeltaNet \(Euler\), diverged at reading \d+/);
    assert.match(await text(page, "predictions-legend"), /EFLA \(exact\), off by/);
    await checks(page, "smoothing-checks");
    await checks(page, "memory-checks");
  },

  async "every control is reached by Tab, in order, and shows it"() {
    // Tab goes on from where the last click was.
    await page.locator("h1").click();
    const reached = [];
    for (let i = 0; i < 20; i++) {
      await page.keyboard.press("Tab");
      const at = await page.evaluate(() => {
        const { activeElement } = document;
        const { outlineStyle, outlineWidth } = getComputedStyle(activeElement);
        const name = activeElement.labels?.[0]?.innerText ?? activeElement.getAttribute("aria-label");
        const outline = `${outlineStyle} ${outlineWidth}`;
        return { id: activeElement.id, outline, name, body: activeElement === document.body };
      });
      if (at.body) break;
      assert.equal(at.outline, "solid 3px", at.id);
      assert.ok(at.name?.trim(), `${at.id} has no label`);
      if (at.id) reached.push(at.id);
    }
    assert.deepEqual(reached, ["series", "sampling", "kept", "bandwidth", "sink", "row", "scale"]);
  },

  async "every sink and every sampling"() {
    const seen = new Set();
    for (const sink of ["first", "zero", "none"]) {
      await page.selectOption("#sink", sink);
      await settled(page);
      seen.add(await chart(page, "curves"));
      await checks(page, "smoothing-checks");
    }
    for (const sampling of ["uniform", "random", "sparse", "season"]) {
      await page.selectOption("#sampling", sampling);
      await settled(page);
      seen.add(await chart(page, "curves"));
      await checks(page, "smoothing-checks");
    }
    // The last is the first again.
    assert.equal(seen.size, 6);
  },

  async "a sink takes weight from the first row"() {
    await page.selectOption("#series", "wave");
    await page.selectOption("#sink", "zero");
    await page.locator("#row").fill("0");
    await settled(page);
    assert.match(await text(page, "weights-legend"), /to the sink/);
    await page.selectOption("#sink", "none");
    await settled(page);
    assert.doesNotMatch(await text(page, "weights-legend"), /to the sink/);
    await page.locator("#row").fill("80");
    await settled(page);
    await checks(page, "memory-checks");
  },

  async "a select answers to the keyboard"() {
    await page.locator("#series").focus();
    await page.keyboard.press("ArrowDown");
    await settled(page);
    assert.equal(await page.locator("#series").inputValue(), "own");
    assert.equal(await page.locator("#own").isVisible(), true);
    await checks(page, "smoothing-checks");
  },

  async "a drawn curve is smoothed"() {
    const before = await chart(page, "curves");
    const box = await page.locator("#draw").boundingBox();
    const move = (i) => page.mouse.move(box.x + (i / 40) * box.width, box.y + box.height * (0.5 + 0.3 * Math.sin(i / 3)));
    await move(1);
    await page.mouse.down();
    for (let i = 2; i < 40; i++) await move(i);
    await page.mouse.up();
    await settled(page);
    assert.notEqual(await chart(page, "curves"), before);
    const lines = (await page.locator("#numbers").inputValue()).split("\n");
    assert.ok(lines.length > 110 && lines.length <= 121, `${lines.length} lines`);
    await checks(page, "smoothing-checks");
    await checks(page, "memory-checks");
    await page.screenshot({ path: `${SHOTS}drawn.png`, fullPage: true });
  },

  async "a file is loaded, and one that can't be read is refused by its line"() {
    const load = async (content) => {
      await page.setInputFiles("#file", { name: "series.csv", mimeType: "text/csv", buffer: Buffer.from(content) });
      // The file is read first; then the page computes.
      await page.waitForFunction((content) => document.getElementById("numbers").value === content, content);
      await settled(page);
    };
    const rows = Array.from({ length: 60 }, (_, i) => `2001-${String(1 + (i % 12)).padStart(2, "0")}-01,${i}`);
    await load("date,value\n" + Array.from({ length: 60 }, (_, i) => `${i / 6},${(i % 7) + 0.5}`).join("\n"));
    assert.equal(await page.locator("#error").isVisible(), false);
    assert.match(await text(page, "kept-value"), /of 60 samples/);
    await checks(page, "smoothing-checks");
    await load(rows.join("\n"));
    assert.match(await text(page, "error"), /^line 13: got “2001-01-01,12”, needed a later time/);
    await load("1\n2\n");
    assert.match(await text(page, "error"), /got 2 samples, needed at least 8/);
  },

  async "typed numbers, by keyboard"() {
    await page.locator("#numbers").focus();
    await page.keyboard.press("Control+A");
    await page.keyboard.type(Array.from({ length: 12 }, (_, i) => (i * 5) % 7).join("\n"));
    await page.keyboard.press("Tab");
    await settled(page);
    assert.equal(await page.locator("#error").isVisible(), false, await text(page, "error"));
    assert.match(await text(page, "kept-value"), /of 12 samples/);
    await checks(page, "smoothing-checks");
    await checks(page, "memory-checks");
  },

  async "changes made while it computes are taken up"() {
    await page.selectOption("#series", "co2");
    for (const kept of ["100", "50", "20"]) await page.locator("#kept").fill(kept);
    await settled(page);
    assert.match(await text(page, "kept-value"), /^20 %/);
    await checks(page, "smoothing-checks");
  },

  async "the module computes what the library documents"() {
    const result = await page.evaluate(async () => {
      const { create, referenceAttention, judge } = await import("./continuous_attention.js");
      const engine = await create();
      // All keys are equal, so values are averaged over time: ½ over [0, 1], 1 over [0, 2].
      const { out, lse } = await engine.attention({
        q: new Float32Array([1, 1]),
        k: new Float32Array([0, 0]),
        v: new Float32Array([1, 2]),
        headDim: 1,
        valueDim: 1,
      });
      // An exact step with β|k|² = 1 moves the state by (1 − 1/e) of the way.
      const efla = await engine.efla({
        q: new Float32Array([1]),
        k: new Float32Array([1]),
        v: new Float32Array([1]),
        beta: new Float32Array([1]),
        keyDim: 1,
        valueDim: 1,
        form: "recurrent",
      });
      const noise = (n, seed) => Float32Array.from({ length: n }, (_, i) => Math.sin(i * 12.9898 + seed) * 1.5);
      const sizes = { batch: 2, heads: 4, kvHeads: 2, headDim: 24, valueDim: 20 };
      const call = {
        ...sizes,
        q: noise(2 * 4 * 33 * 24, 1),
        k: noise(2 * 2 * 50 * 24, 2),
        v: noise(2 * 2 * 50 * 20, 3),
        sink: "given",
        sinkK: noise(2 * 24, 4),
        sinkV: noise(2 * 20, 5),
        intervals: noise(2 * 50, 6).map(Math.abs),
        window: 17,
      };
      const [got, want] = await Promise.all([engine.attention(call), referenceAttention(call)]);
      const factor = Math.max(1, want.largestLogit / 8);
      const row = { row: 9, head: 3, batchEntry: 1 };
      const { weights } = await engine.attentionWeights({ ...call, ...row });
      return {
        out: [...out],
        lse: [...lse],
        efla: [efla.out[0], efla.finalState[0]],
        judged: [await judge(got.out, want.out, { factor }), await judge(got.lse, want.lse, { factor, lse: true })],
        wrong: await judge(got.out.map((x) => x * 1.001), want.out, { factor }),
        window: weights.findLastIndex((weight) => weight > 0) - weights.findIndex((weight) => weight > 0),
        last: weights.findLastIndex((weight) => weight > 0),
      };
    });
    const near = (got, want) => assert.ok(Math.abs(got - want) < 1e-6, `${got}, not ${want}`);
    near(result.out[0], 0.5);
    near(result.out[1], 1);
    near(result.lse[0], 0);
    near(result.lse[1], Math.log(2));
    for (const value of result.efla) near(value, 1 - Math.exp(-1));
    for (const judged of result.judged) assert.ok(judged.passed, judged.failure);
    assert.equal(result.wrong.passed, false);
    // Row 9 of 33 sees up to token 9 + 50 − 33, and 17 segments have 18 nodes.
    assert.deepEqual([result.last, result.window], [26, 17]);
  },

  async "what is wrong with a call comes as an Error"() {
    const errors = await page.evaluate(async () => {
      const { create, referenceEfla } = await import("./continuous_attention.js");
      const engine = await create();
      const told = (error) => ({ error: error instanceof Error, kind: error.kind, message: error.message });
      const caught = (promise) => promise.then(() => null, told);
      const [q, k, v] = [new Float32Array(4), new Float32Array(4), new Float32Array(4)];
      return Promise.all([
        caught(engine.attention({ q, k, v, headDim: 2 })),
        caught(engine.attention({ q, k, v: [1], headDim: 2, valueDim: 2 })),
        caught(engine.attention({ q, k, v, headDim: 2, valueDim: 3 })),
        caught(engine.attention({ q, k, v, headDim: 2, valueDim: 2, sinks: "zero" })),
        caught(engine.attention({ q, k, v, headDim: 2, valueDim: 2, sink: "given" })),
        caught(engine.efla({ q, k, v, beta: v, keyDim: 2, valueDim: 2 })),
        caught(referenceEfla({ q, k, v, beta: v.subarray(2), keyDim: 2, valueDim: 2, integrator: "rk3" })),
      ]);
    });
    const wanted = [
      /^valueDim: got nothing, needed 1 to 256/,
      /^v: got Array, needed a Float32Array/,
      /^v: got 4 elements, needed those of shape \[1, 1, 2, 3\]/,
      /^sinks: got an unknown argument, needed .*sinkK/,
      /^sink_k: got none/,
      /^beta: got 4 elements, needed those of shape \[1, 1, 2\]/,
      /^integrator: got rk3, needed exact, euler, rk2, rk4/,
    ];
    for (const [i, error] of errors.entries()) {
      assert.ok(error?.error, `${i}: ${JSON.stringify(error)}`);
      assert.equal(error.kind, "argument");
      assert.match(error.message, wanted[i]);
    }
  },

  async "what the browser says late comes as an Error, too"() {
    const context = await browser.newContext();
    const page = await context.newPage();
    await page.goto(`${address}empty`);
    const [error, other] = await page.evaluate(async () => {
      const { create } = await import("./continuous_attention.js");
      const engine = await create();
      const { createShaderModule } = GPUDevice.prototype;
      GPUDevice.prototype.createShaderModule = function (descriptor) {
        const code = descriptor.label.startsWith("attention") ? "no shader" : descriptor.code;
        return createShaderModule.call(this, { ...descriptor, code });
      };
      const one = new Float32Array([1]);
      const attention = { q: one, k: one, v: one, headDim: 1, valueDim: 1 };
      const efla = { q: one, k: one, v: one, beta: one, keyDim: 1, valueDim: 1, form: "recurrent" };
      const told = (promise) => promise.then(() => null, ({ kind, message }) => ({ kind, message }));
      // Of two that overlap each hears its own.
      return Promise.all([told(engine.attention(attention)), told(engine.efla(efla))]);
    });
    assert.equal(error?.kind, "gpu");
    assert.match(error.message, /^compiling failed: .*no shader/s);
    assert.equal(other, null);
    await context.close();
  },

  async "the console is clean and nothing came from elsewhere"() {
    assert.deepEqual(desktop.complaints, []);
  },

  async "it fits a phone, by touch"() {
    const { context, page, complaints } = await open(browser, address, PHONE);
    await settled(page);
    await checks(page, "smoothing-checks");
    await page.screenshot({ path: `${SHOTS}phone.png`, fullPage: true });
    await page.selectOption("#series", "own");
    await settled(page);
    for (const width of [390, 360]) {
      await page.setViewportSize({ width, height: 800 });
      const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
      assert.ok(wide <= 0, `${wide} pixels too wide at ${width}`);
    }
    const small = await page.locator("select:visible, input:visible").evaluateAll((controls) =>
      controls.filter((control) => control.getBoundingClientRect().height < 36).map((control) => control.id),
    );
    assert.deepEqual(small, [], "too small to touch");
    await page.screenshot({ path: `${SHOTS}phone-own.png`, fullPage: true });
    assert.deepEqual(complaints, []);
    await context.close();
  },

  async "it is readable in the dark"() {
    const dark = { viewport: { width: 1000, height: 900 }, colorScheme: "dark" };
    const { context, page } = await open(browser, address, dark);
    await settled(page);
    const [paper, ink] = await page.evaluate(() => {
      const { backgroundColor, color } = getComputedStyle(document.body);
      return [backgroundColor, color].map((rgb) => rgb.match(/\d+/g).slice(0, 3).reduce((sum, c) => sum + Number(c), 0));
    });
    assert.ok(paper < 150 && ink > 600, `${paper} ${ink}`);
    await page.screenshot({ path: `${SHOTS}dark.png`, fullPage: true });
    await context.close();
  },

  async "without WebGPU it says so"() {
    const context = await browser.newContext(PHONE);
    const page = await context.newPage();
    await page.addInitScript(() => Object.defineProperty(Navigator.prototype, "gpu", { get: () => undefined }));
    await page.goto(address);
    await settled(page);
    assert.match(await text(page, "missing"), /^No WebGPU here/);
    assert.equal(await page.locator("#main").isVisible(), false);
    await page.screenshot({ path: `${SHOTS}missing.png` });
    await context.close();
  },

  async "with WebGPU switched off it says so"() {
    const without = await launch({ webgpu: false });
    const { page } = await open(without, address);
    await settled(page);
    assert.match(await text(page, "missing"), /^No WebGPU here/);
    assert.match(await text(page, "reason"), /\S/);
    await without.close();
  },
};

mkdirSync(SHOTS, { recursive: true });
const only = process.argv[2];
let [passed, failed] = [0, 0];
for (const [name, test] of Object.entries(tests)) {
  if (only && !name.includes(only)) continue;
  const start = performance.now();
  try {
    await test();
    passed += 1;
    console.log(`test ${name} ... ok (${((performance.now() - start) / 1000).toFixed(1)} s)`);
  } catch (error) {
    failed += 1;
    console.log(`test ${name} ... FAILED\n${error.stack}`);
  }
}
await browser.close();
server.close();
console.log(`test result: ${failed ? "FAILED" : "ok"}. ${passed} passed; ${failed} failed; 0 ignored`);
process.exitCode = failed ? 1 : 0;
