// Serves the built page on localhost, and an empty one at /empty.

import { createReadStream, statSync } from "node:fs";
import { createServer } from "node:http";
import { extname, join, normalize } from "node:path";
import { fileURLToPath } from "node:url";

export const SITE = fileURLToPath(new URL("../../../target/web/site/", import.meta.url));
const TYPES = {
  ".html": "text/html",
  ".css": "text/css",
  ".js": "text/javascript",
  ".svg": "image/svg+xml",
  ".wasm": "application/wasm",
  ".csv": "text/csv",
};

/** The server and its address. */
export async function serve() {
  const server = createServer((request, response) => {
    const { pathname } = new URL(request.url, "http://localhost");
    if (pathname === "/empty") {
      response.writeHead(200, { "Content-Type": "text/html" }).end();
      return;
    }
    const file = join(SITE, normalize(pathname === "/" ? "/index.html" : pathname));
    if (!file.startsWith(SITE) || !statSync(file, { throwIfNoEntry: false })?.isFile()) {
      response.writeHead(404).end();
      return;
    }
    response.writeHead(200, { "Content-Type": TYPES[extname(file)] ?? "application/octet-stream" });
    createReadStream(file).pipe(response);
  });
  await new Promise((listening) => server.listen(0, "localhost", listening));
  return { server, address: `http://localhost:${server.address().port}/` };
}
