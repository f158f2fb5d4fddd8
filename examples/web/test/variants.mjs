// Every composed shader through the browser's own WGSL compiler: `node variants.mjs FILE`, a line of JSON per variant as
// src/shader/tests.rs writes them. Any message fails, a warning too.

import { createReadStream } from "node:fs";
import { createInterface } from "node:readline";
import { launch, open } from "./browser.mjs";
import { serve } from "./server.mjs";

/** Variants sent to the page at once. */
const BATCH = 50;

/** Compiles in the page; what the compiler says. A variant may state `directives` that come before its text. */
async function compile(variants) {
  globalThis.device ??= await navigator.gpu.requestAdapter().then((adapter) =>
    adapter.requestDevice({ requiredFeatures: ["subgroups"].filter((feature) => adapter.features.has(feature)) }),
  );
  const { device } = globalThis;
  const said = variants.map(async ({ name, text, directives = "" }) => {
    device.pushErrorScope("validation");
    const code = directives + text;
    const module = device.createShaderModule({ code });
    const error = await device.popErrorScope();
    const { messages } = await module.getCompilationInfo();
    const lines = code.split("\n");
    const found = messages.map(({ type, message, lineNum }) => `${name}: ${type}: ${message}: ${lines[lineNum - 1]}`);
    return error && !found.length ? [`${name}: ${error.message}`] : found;
  });
  return (await Promise.all(said)).flat();
}

const { server, address } = await serve();
const browser = await launch();
const { page } = await open(browser, `${address}empty`);
// A compiler that never complains would prove nothing: a mistake, and a barrier that only browsers refuse.
const wrong = [
  "@compute @workgroup_size(1) fn main( {}",
  `@compute @workgroup_size(32) fn main(@builtin(local_invocation_index) index: u32) {
    if index < 7u { return; }
    workgroupBarrier();
  }`,
];
const refused = await page.evaluate(compile, wrong.map((text, i) => ({ name: `wrong ${i}`, text })));
const strict = wrong.every((_, i) => refused.some((message) => message.startsWith(`wrong ${i}: error`)));

const messages = [];
let [count, batch] = [0, []];
const send = async () => {
  count += batch.length;
  messages.push(...(await page.evaluate(compile, batch)));
  batch = [];
};
for await (const line of createInterface({ input: createReadStream(process.argv[2]) })) {
  batch.push(JSON.parse(line));
  if (batch.length === BATCH) await send();
}
await send();
await browser.close();
server.close();

for (const message of messages.slice(0, 20)) console.error(message);
console.log(`${count} shaders compiled, ${messages.length} messages`);
const tests = {
  "the browser's compiler refuses what is wrong": strict,
  "it takes every shader without a word": count > 1500 && !messages.length,
};
for (const [name, ok] of Object.entries(tests)) console.log(`test ${name} ... ${ok ? "ok" : "FAILED"}`);
const failed = Object.values(tests).filter((ok) => !ok).length;
const passed = Object.keys(tests).length - failed;
console.log(`test result: ${failed ? "FAILED" : "ok"}. ${passed} passed; ${failed} failed; 0 ignored`);
process.exitCode = failed ? 1 : 0;
