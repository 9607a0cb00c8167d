// The public suite, pointed at the server that test_public_suite.py has started.
import { runConformanceTests } from "@durable-streams/server-conformance-tests"

runConformanceTests({
  baseUrl: process.env.FENCEPOST_BASE_URL,
  subscriptions: true,
  longPollTimeoutMs: 500,
})
