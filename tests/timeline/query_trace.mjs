// Answers SQL about a trace by Perfetto's trace processor, in its build for WebAssembly:
//   node query_trace.mjs FOLDER TRACE < queries.json > answers.json
// FOLDER has the files that scripts/fetch_trace_processor.py fetches. queries.json is a list of texts, answers.json a
// list of rows for each.
import { readFileSync } from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";
import vm from "node:vm";

const [folder, trace] = process.argv.slice(2);
const CHUNK_BYTES = 2 ** 20;

// The program was made for a worker of a page, where it reads its .wasm by a synchronous request.
class FileRequest {
  open(_, name) {
    this.name = name;
  }
  send() {
    this.response = readFileSync(path.join(folder, this.name));
    this.status = 200;
  }
}

function startProgram() {
  const { Module } = WebAssembly;
  Object.assign(globalThis, {
    self: globalThis,
    WorkerGlobalScope: Object,
    XMLHttpRequest: FileRequest,
    location: { href: pathToFileURL(folder + path.sep).href },
  });
  // Its first module probes for memory of 64 bits, which newer Nodes have; the folder's .wasm is for 32.
  WebAssembly.Module = class {
    constructor() {
      WebAssembly.Module = Module;
      throw new Error("32 bits are wanted");
    }
  };
  console.log = console.warn = console.error; // the standard output is for the answers
  vm.runInThisContext(readFileSync(path.join(folder, "engine_bundle.node.js"), "utf8"));
}

const { EngineBase } = await import(pathToFileURL(path.join(folder, "engine.mjs")));

class LocalEngine extends EngineBase {
  id = "local";
  constructor() {
    super();
    this.port = { postMessage: (bytes) => this.onRpcResponseBytes(bytes) };
    self.onmessage({ data: this.port });
  }
  rpcSendRequestBytes(bytes) {
    this.port.onmessage({ data: bytes });
  }
}

function rowsOf(result) {
  const rows = [];
  for (const row = result.iter({}); row.valid(); row.next()) {
    rows.push(Object.fromEntries(result.columns().map((name) => [name, row.get(name)])));
  }
  return rows;
}

startProgram();
await new Promise((resolve) => setTimeout(resolve, 0)); // the rest of its start is in a promise
const engine = new LocalEngine();
const content = readFileSync(trace);
for (let at = 0; at < content.length; at += CHUNK_BYTES) {
  await engine.parse(content.subarray(at, at + CHUNK_BYTES));
}
await engine.notifyEof();
const answers = [];
for (const query of JSON.parse(readFileSync(0, "utf8"))) {
  answers.push(rowsOf(await engine.query(query)));
}
process.stdout.write(JSON.stringify(answers, (_, value) => (typeof value === "bigint" ? Number(value) : value)));
process.exitCode = 0;
