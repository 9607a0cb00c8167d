// The public npm state package against the server named in FENCEPOST_BASE_URL: it writes changes,
// or prints, as one line of JSON, the rows that it makes of a stream that others wrote.
import { DurableStream, stream } from "@durable-streams/client"
import { MaterializedState, createStateSchema, isChangeEvent, isControlEvent } from "@durable-streams/state"

const at = (path) => `${process.env.FENCEPOST_BASE_URL}/v1/stream/${path}`
const anything = { "~standard": { version: 1, vendor: "tests", validate: (value) => ({ value }) } }
const schema = createStateSchema({
  users: { schema: anything, type: "user", primaryKey: "id" },
  flags: { schema: anything, type: "flag", primaryKey: "id" },
})

const scenarios = {
  async write(path) {
    const handle = await DurableStream.create({ url: at(path), contentType: "application/json" })
    const ada = { id: "1", name: "Ada" }
    const events = [
      schema.users.insert({ value: ada }),
      schema.users.insert({ value: { id: "2", name: "Bob" }, headers: { txid: "t-1" } }),
      schema.users.update({ value: { id: "1", name: "Ada L." }, oldValue: ada }),
      schema.flags.upsert({ value: { id: "dark", enabled: true } }),
      schema.users.delete({ key: "2" }),
    ]
    for (const event of events) await handle.append(JSON.stringify(event))
    return events.length
  },

  async read(path) {
    const events = await (await stream({ url: at(path), live: false })).json()
    const rows = new MaterializedState()
    rows.applyBatch(events.filter(isChangeEvent))
    const shown = rows.types.map((type) => [type, Object.fromEntries(rows.getType(type))])
    return { rows: Object.fromEntries(shown), controls: events.filter(isControlEvent).length }
  },
}

const [scenario, ...rest] = process.argv.slice(2)
console.log(JSON.stringify(await scenarios[scenario](...rest)))
