// Fingerprints of sends, written from docs/reference/fingerprints.md alone: no other code was read
// or is used. Reads one JSON object a line ({kind, ref, reply_to, priority, meta, body_base64}, with
// meta as the text that was sent, or null) and prints a line for each: the fingerprint in
// hexadecimal, or the code of the refusal.

import { createHash } from "node:crypto"
import { createInterface } from "node:readline"

const KINDS = ["topic", "dm", "queue"]
const PRIORITIES = ["now", "next", "low"]
const DEPTH_MAX = 32
const META_BYTES_MAX = 16 * 1024
const NUMBER = /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/y
const STRING = /"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"/y
const SPACE = /[ \t\r\n]*/y
const WORDS = { true: true, false: false, null: null }

class Refused extends Error {}

const isUnfit = (text) => /[\u0000-\u001f\u007f]/.test(text) || !text.isWellFormed()
const sha256 = (data) => createHash("sha256").update(data)

class Parser {
  constructor(text) {
    this.text = text
    this.at = 0
  }

  whole() {
    const value = this.value(0)
    this.take(SPACE)
    if (this.at !== this.text.length) throw new Refused("meta_invalid")
    return value
  }

  take(pattern) {
    pattern.lastIndex = this.at
    const found = pattern.exec(this.text)
    if (found === null) throw new Refused("meta_invalid")
    this.at = pattern.lastIndex
    return found
  }

  isNext(character) {
    this.take(SPACE)
    if (this.text[this.at] !== character) return false
    this.at += 1
    return true
  }

  must(character) {
    if (!this.isNext(character)) throw new Refused("meta_invalid")
  }

  value(depth) {
    if (this.isNext("{")) return this.object(depth + 1)
    if (this.isNext("[")) return this.array(depth + 1)
    if (this.text[this.at] === '"') return this.string()
    for (const [word, meaning] of Object.entries(WORDS)) {
      if (this.text.startsWith(word, this.at)) {
        this.at += word.length
        return meaning
      }
    }
    const [digits, , fraction, exponent] = this.take(NUMBER)
    const number = Number(digits)
    const isInteger = fraction === undefined && exponent === undefined
    if (!Number.isFinite(number) || (isInteger && !Number.isSafeInteger(number))) {
      throw new Refused("meta_number_invalid")
    }
    return number
  }

  string() {
    const text = JSON.parse(this.take(STRING)[0])
    if (!text.isWellFormed()) throw new Refused("meta_invalid")
    return text
  }

  array(depth) {
    if (depth > DEPTH_MAX) throw new Refused("meta_too_deep")
    const items = []
    if (this.isNext("]")) return items
    do items.push(this.value(depth))
    while (this.isNext(","))
    this.must("]")
    return items
  }

  object(depth) {
    if (depth > DEPTH_MAX) throw new Refused("meta_too_deep")
    const fields = new Map()
    if (this.isNext("}")) return fields
    do {
      this.take(SPACE)
      const key = this.string()
      if (fields.has(key)) throw new Refused("meta_duplicate_key")
      this.must(":")
      fields.set(key, this.value(depth))
    } while (this.isNext(","))
    this.must("}")
    return fields
  }
}

function canonical(value) {
  if (value instanceof Map) {
    // The default order of sort() is by UTF-16 code units.
    const keys = [...value.keys()].sort()
    return `{${keys.map((key) => `${JSON.stringify(key)}:${canonical(value.get(key))}`).join(",")}}`
  }
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`
  return JSON.stringify(value)
}

function canonicalMeta(text) {
  if (text === null) return ""
  if (Buffer.byteLength(text) > META_BYTES_MAX) throw new Refused("meta_too_large")
  const value = new Parser(text).whole()
  if (!(value instanceof Map)) throw new Refused("meta_not_object")
  return value.size === 0 ? "" : canonical(value)
}

function fingerprint(send) {
  if (!KINDS.includes(send.kind)) throw new Refused("kind_invalid")
  if (!/^(?!\.\.?$)[A-Za-z0-9._-]{1,64}$/.test(send.ref)) throw new Refused("ref_invalid")
  if (isUnfit(send.reply_to) || Buffer.byteLength(send.reply_to) > 256) {
    throw new Refused("reply_to_invalid")
  }
  if (!PRIORITIES.includes(send.priority)) throw new Refused("priority_invalid")
  const body = sha256(Buffer.from(send.body_base64, "base64")).digest("hex")
  const meta = canonicalMeta(send.meta)
  const fields = ["1", send.kind, send.ref, send.reply_to, send.priority, meta, body]
  return sha256(fields.join("\0")).digest("hex")
}

for await (const line of createInterface({ input: process.stdin })) {
  try {
    console.log(fingerprint(JSON.parse(line)))
  } catch (error) {
    if (!(error instanceof Refused)) throw error
    console.log(error.message)
  }
}
