// Chromium with WebGPU, and a page that hears every complaint.

import { chromium } from "playwright-core";

/** Starts Chromium, or the binary that `CHROMIUM` names. Without a GPU WebGPU runs on SwiftShader. */
export function launch({ webgpu = true } = {}) {
  const executablePath = process.env.CHROMIUM ?? "/usr/bin/chromium";
  const args = [
    "--no-sandbox",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    ...(webgpu ? ["--enable-unsafe-webgpu"] : ["--disable-features=WebGPU"]),
  ];
  return chromium.launch({ executablePath, args });
}

/** Opens `address`; complaints are what the console, the page or the network said, requests to elsewhere included. */
export async function open(browser, address, options) {
  const context = await browser.newContext(options);
  const page = await context.newPage();
  const complaints = [];
  page.on("console", (message) => {
    if (["error", "warning", "assert"].includes(message.type())) complaints.push(`${message.type()}: ${message.text()}`);
  });
  page.on("pageerror", (error) => complaints.push(`exception: ${error.message}`));
  page.on("requestfailed", (request) => complaints.push(`failed: ${request.url()}`));
  page.on("response", (response) => response.ok() || complaints.push(`${response.status()}: ${response.url()}`));
  page.on("request", (request) => {
    if (!request.url().startsWith(address)) complaints.push(`elsewhere: ${request.url()}`);
  });
  await page.goto(address);
  return { context, page, complaints };
}
