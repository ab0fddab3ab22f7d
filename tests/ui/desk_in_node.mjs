// Drives components/desk.js, the real one, with a clock and a route of its own, through random orders of what may happen.
// Graph and server are models of graph.js and of ui/shared/draft.py: a list of numbered steps, and who takes them over.
import { readFileSync } from "node:fs"

const [file, n_runs] = [process.argv[2], Number(process.argv[3])]
const source = readFileSync(file, "utf8")
let seed = 1
const random = (n) => (seed = (seed * 48271) % 2147483647) % n
const PLANS = [[], ["a"], ["a", "b"], ["a", "b", "c", "d"]]
const same = (one, other) => [...one].sort().join() === [...other].sort().join()
const flip = (marks, ids) => ids.forEach((id) => marks.delete(id) || marks.add(id))

function world() {
  const timers = new Map()
  const fetches = [] // questions on their way and answers on their way back
  const wire = [] // messages to Streamlit, in their order
  const reruns = [] // what Streamlit has drawn and the browser not yet
  const log = []
  let [now, ids, events] = [0, 0, 0]
  const fake = {
    setTimeout: (act, ms, ...rest) => (timers.set(++ids, [now + ms, () => act(...rest)]), ids),
    clearTimeout: (id) => timers.delete(id),
    fetch: (_, { body }) => new Promise((done) => {
      const question = JSON.parse(body)
      fetches.push({ question, done, early: random(2) ? answerTo(question) : undefined }) // before the next rerun, or behind it
    }),
    document: { querySelector: () => null, createElement: () => ({ style: {}, remove() {} }) },
  }
  const home = {}
  new Function("globalThis", ...Object.keys(fake), source)(home, ...Object.values(fake))
  const desk = home.explorerDesk

  // The page: `known` is how many policy steps it has taken over, `truth` what they and changes elsewhere make in order.
  const state = () => ({ on: new Set(), past: [], future: [] })
  const server = { ...state(), taken: 0, known: 0 }
  let keys = copy(server)
  const truth = state()
  const shown = { known: 0, on: new Set() }

  function show(known, on, who) {
    log.push(`${who} shows ${known}: ${[...on]}`)
    if (known < shown.known) throw Error(`${who} draws change ${known} over change ${shown.known}`)
    Object.assign(shown, { known, on: new Set(on) })
  }

  let data = keys
  const fresh = () => ({ served: new Set(), on: new Set(), isFirst: true, list: desk.listOf({ desk: "graph", taken: data.taken }) })
  let v = fresh()
  const isSure = () => v.list.steps.every(({ kind }) => ["on", "open"].includes(kind))
  const flipped = (marks, last = 0) => {
    const on = new Set(marks)
    v.list.steps.forEach(({ n, kind, ids }) => kind === "on" && n > last && flip(on, ids))
    return on
  }
  const tell = () => {
    desk.isTold()
    wire.push({ list: [...v.list.steps], press: v.list.press })
  }
  const act = (step) => {
    v.list.steps.push({ n: ++v.list.n, known: events, ...step })
    step.kind === "open" ? tell() : desk.changed(v.list.n, random(2) ? 1000 : undefined)
  }
  function answerTo({ steps }) {
    const then = copy(keys)
    take(then, steps)
    return { on: [...then.on], cells: { known: then.known, on: then.on }, sentence: "", danger: "", line: null }
  }
  const makeHooks = () => ({
    question: () => ({ steps: v.list.steps }),
    tell,
    draw: (answer, last) => (v.on = flipped(answer.on, last)),
  })
  let hooks = makeHooks()
  desk.strip = ({ known, on }) => show(known, on, "the route")

  function take(page, steps, last = Infinity) {
    for (const { n, known, ...step } of steps) {
      if (n <= page.taken || n > last) continue
      decide(page, step)
      page.taken = n
      if (step.kind !== "open") page.known = Math.max(page.known, known)
    }
  }

  const happen = {
    click() {
      const step = { kind: "on", ids: ["abcd"[random(4)]] }
      person(step)
      flip(v.on, step.ids)
      act(step)
    },
    choice() {
      const step = [{ kind: "set", ids: PLANS[random(PLANS.length)] }, { kind: "undo" }, { kind: "redo" }][random(3)]
      person(step)
      act(step)
    },
    fold() {
      act({ kind: "open", ids: [] })
    },
    press() {
      if (wire.some((item) => item.elsewhere)) return // rule 4 holds one press a rerun
      if (!v.list.steps.length || v.list.press === v.list.n) return
      v.list.press = v.list.n
      tell()
    },
    elsewhere() {
      if (wire.some((item) => item.elsewhere)) return // rule 4 holds one press a rerun
      happen.press()
      const step = { kind: "set", ids: ["c"] }
      decide(truth, step)
      wire.push({ elsewhere: step })
    },
    tick() {
      now += 120
      for (const [id, [at, act]] of timers) if (at <= now) (timers.delete(id), act())
    },
    async answered() {
      if (!fetches.length) return
      const { question, done, early, outdated } = fetches.shift()
      const answer = random(8) === 0 ? null : early === undefined ? answerTo(question) : early
      done({ status: answer ? 200 : 204, json: async () => answer })
      await new Promise(setImmediate)
      const newest = v.list.steps.findLast(({ kind }) => kind !== "open")?.known ?? 0
      if (answer && !outdated && !fetches.length && shown.known < newest) throw Error(`change ${newest} was not asked`)
      if (answer && !outdated && shown.known < answer.cells.known) throw Error(`the answer to ${answer.cells.known} was not drawn`)
      check("an answer")
    },
    rerun() {
      const came = wire.splice(0, 1 + random(3))
      server.last = came.findLast((item) => item.list) ?? server.last
      for (const { elsewhere } of came) {
        if (!elsewhere) continue
        if (server.last) take(server, server.last.list, server.last.press)
        decide(server, elsewhere)
      }
      if (server.last) take(server, server.last.list)
      keys = copy(server)
      reruns.push(keys)
    },
    drawn() {
      if (!reruns.length) return
      data = reruns.shift()
      const about = { desk: "graph", taken: data.taken }
      if (!desk.isAhead(about)) show(data.known, data.on, "a rerun")
      draw()
    },
    remount() {
      desk.leave(hooks) // Streamlit draws the graph in another place, with the data that it has
      fetches.forEach((one) => { one.outdated = true })
      hooks = makeHooks()
      v = fresh()
      draw()
    },
  }
  function draw() {
    v.served = data.on
    v.list.steps = v.list.steps.filter(({ n }) => n > data.taken)
    v.list.n = Math.max(v.list.n, data.taken + v.list.steps.length)
    if (v.isFirst || isSure()) v.on = flipped(data.on)
    const isAhead = desk.heard({ desk: "graph", taken: data.taken, line: null }, hooks)
    if (v.isFirst && v.list.steps.length) desk.changed(v.list.n)
    else if (isAhead) desk.askAgain()
    if (!isAhead) fetches.forEach((one) => { one.outdated = true })
    v.isFirst = false
  }
  function person(step) {
    events++
    decide(truth, step)
  }
  // Flips show at once, on what the last rerun drew.
  function check(who) {
    if (isSure() && !same(v.on, flipped(v.served)) && !v.list.steps.length) throw Error(`${who} left ${[...v.on]}`)
  }
  return { happen, log, end: async () => {
    for (let i = 0; i < 40; i++) {
      happen.tick()
      await happen.answered()
      if (wire.length || i === 39) happen.rerun()
      happen.drawn()
    }
    while (reruns.length) happen.drawn()
    for (const [what, on] of [["the page", server.on], ["the strip", shown.on], ["the graph", v.on]])
      if (!same(on, truth.on)) throw Error(`${what} has ${[...on]}, and ${[...truth.on]} was chosen`)
    for (const steps of ["past", "future"])
      if (server[steps].join(";") !== truth[steps].join(";")) throw Error(`${steps}: ${server[steps]}, not ${truth[steps]}`)
  } }
}

const text = (on) => [...on].sort().join()
const copy = (page) => ({ ...page, on: new Set(page.on), past: [...page.past], future: [...page.future] })

// One decision: a flip, a whole policy, an undo. What changes nothing is no step of undo.
function decide(page, { kind, ids }) {
  if (kind === "open") return
  const [from, to] = kind === "undo" ? [page.past, page.future] : [page.future, page.past]
  if (["undo", "redo"].includes(kind)) {
    if (from.length) (to.push(text(page.on)), (page.on = new Set(from.pop().split(",").filter(Boolean))))
    return
  }
  const on = new Set(kind === "set" ? ids : page.on)
  if (kind === "on") flip(on, ids)
  if (same(on, page.on)) return
  page.past.push(text(page.on))
  Object.assign(page, { on, future: [] })
}

const KINDS = ["click", "click", "choice", "choice", "fold", "press", "elsewhere", "remount", "tick", "answered", "answered", "rerun", "rerun", "drawn", "drawn"]
for (let run = 0; run < n_runs; run++) {
  const { happen, log, end } = world()
  try {
    happen.rerun()
    happen.drawn()
    for (let i = 0; i < 5 + random(30); i++) {
      const kind = KINDS[random(KINDS.length)]
      log.push(kind)
      await happen[kind]()
    }
    await end()
  } catch (error) {
    console.log(`run ${run}: ${error.message}\n${log.join("\n")}`)
    process.exit(1)
  }
}
console.log(`${n_runs} orders`)
