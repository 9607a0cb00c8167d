// Runs the reference server as a benchmark subject: one line when ready, gone on SIGTERM.
// With a folder as argument it stores in files, without one in memory. Everything else
// stays as its authors ship it.
import { DurableStreamTestServer } from "@durable-streams/server";

const dataDir = process.argv[2];
const server = new DurableStreamTestServer({ port: 0, host: "127.0.0.1", ...(dataDir ? { dataDir } : {}) });
process.on("SIGTERM", () => process.exit(0));
const url = await server.start();
console.log(`the reference is listening on ${url}`);
