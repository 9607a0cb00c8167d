// The public npm client against the server named in FENCEPOST_BASE_URL: each scenario prints, as
// one line of JSON, what the client saw. test_the_npm_client.py says what it should have seen.
import { DurableStream, IdempotentProducer, stream } from "@durable-streams/client"

const at = (name) => `${process.env.FENCEPOST_BASE_URL}/v1/stream/interop/npm-${name}`
const contentType = "application/json"

// Follows a stream until its end, and hands each item over as soon as it is there.
async function follow(url, live, onItem) {
  const items = []
  const response = await stream({ url, live })
  for await (const item of response.jsonStream()) {
    items.push(item)
    await onItem(item)
  }
  return { items, streamClosed: response.streamClosed }
}

const scenarios = {
  async writing() {
    const handle = await DurableStream.create({ url: at("writing"), contentType })
    await handle.append(JSON.stringify({ event: "click" }))
    await handle.append(JSON.stringify({ event: "scroll" }))
    const { finalOffset } = await handle.close({ body: JSON.stringify({ event: "leave" }) })
    const head = await handle.head()
    const response = await stream({ url: at("writing"), live: false })
    const items = await response.json()
    const refused = await handle.append(JSON.stringify({ event: "too late" })).then(
      () => "it was accepted",
      (error) => ({ status: error.status, streamClosed: error.headers["stream-closed"] })
    )
    return {
      items,
      refused,
      headSaysClosed: head.streamClosed,
      offsetsAgree: finalOffset === head.offset && finalOffset === response.offset,
    }
  },

  // Every item but the first is appended only when the one before it has arrived.
  async live(mode) {
    const url = at(mode)
    const handle = await DurableStream.create({ url, contentType })
    await handle.append(JSON.stringify({ number: 0 }))
    return follow(url, mode, async ({ number }) => {
      if (number < 3) await handle.append(JSON.stringify({ number: number + 1 }))
      else await handle.close()
    })
  },

  async producing() {
    const url = at("producing")
    const handle = await DurableStream.create({ url, contentType })
    const errors = []
    const producer = new IdempotentProducer(handle, "interop", {
      autoClaim: true,
      maxBatchBytes: 256,
      onError: (error) => errors.push(String(error)),
    })
    for (let number = 0; number < 200; number++) producer.append(JSON.stringify(number))
    await producer.flush()
    await producer.close()
    const items = await (await stream({ url, live: false })).json()
    return { items, errors }
  },
}

const [scenario, ...rest] = process.argv.slice(2)
console.log(JSON.stringify(await scenarios[scenario](...rest)))
