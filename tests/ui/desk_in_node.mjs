// Drives components/desk.js, the real one, with a clock and a route of its own, through random orders of what may happen.
// Graph, slider and server are models of graph.js, live_slider.js and ui/components: marks with a base and a revision.
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

  // The page: `known` is how many changes of the person it has taken over, `truth` what these make in their order.
  const server = { on: new Set(), seq: 0, revision: 0, moved: 0, known: 0, was: new Map() }
  let keys = { ...server, on: new Set() }
  const truth = new Set()
  const shown = { known: 0, on: new Set() }

  function show(known, on, who) {
    log.push(`${who} shows ${known}: ${[...on]}`)
    if (known < shown.known) throw Error(`${who} draws change ${known} over change ${shown.known}`)
    Object.assign(shown, { known, on: new Set(on) })
  }

  const v = { served: new Set(), pending: [], seq: 0, revision: 0, on: new Set(), press: null, n: 0 }
  const marked = () => {
    const on = new Set(v.served)
    v.pending.forEach(({ flips }) => flip(on, flips))
    return [...on]
  }
  const message = () => ({ seq: v.seq, base: v.revision, on: marked(), known: v.last ?? 0 })
  const tell = () => {
    desk.isTold(v)
    wire.push({ marks: { ...message(), press: v.press } })
  }
  function answerTo(question) {
    if (question.base !== keys.revision) return null
    const on = new Set(question.place === undefined ? question.on : PLANS[question.place])
    if (question.place !== undefined) flip(on, question.on)
    const known = Math.max(keys.known, question.known)
    return { on: [...on], cells: { known, on }, sentence: "", danger: "", line: null }
  }
  const hooks = {
    seq: () => v.seq,
    marks: () => {
      if (!desk.move) return { base: v.revision, on: marked(), known: v.last ?? 0 }
      const on = new Set()
      v.pending.forEach(({ seq, flips }) => seq > desk.move.seq && flip(on, flips))
      return { base: v.revision, on: [...on], place: desk.move.place, known: Math.max(v.last ?? 0, desk.move.known) }
    },
    draw: (answer, last) => {
      if (!desk.move) return
      v.on = new Set(answer.on)
      v.pending.forEach(({ seq, flips }) => seq > last && flip(v.on, flips))
    },
  }
  desk.strip = ({ known, on }) => show(known, on, "the route")
  const slider = { tell: null }

  function adopt(news) {
    if (!news || news.seq <= server.seq) return
    server.seq = news.seq
    server.known = Math.max(server.known, news.known)
    if (news.base === server.revision) return void (server.on = new Set(news.on))
    const was = server.was.get(news.base)
    const flips = [...new Set([...was, ...news.on])].filter((id) => was.has(id) !== news.on.includes(id))
    for (const [revision, on] of server.was) if (revision >= news.base) flip(on, flips)
    flip(server.on, flips)
  }
  function replace(on, known) {
    server.was.set(server.revision++, new Set(server.on))
    server.on = new Set(on)
    server.known = Math.max(server.known, known)
  }

  const happen = {
    click() {
      const id = "abcd"[random(4)]
      slider.tell && desk.flush(slider) // a press outside the slider
      flip(truth, [id])
      events++
      flip(v.on, [id])
      v.last = events
      v.pending.push({ seq: ++v.seq, flips: [id] })
      desk.change(v, { seq: v.seq }, tell)
    },
    fold() {
      v.pending.push({ seq: ++v.seq, flips: [] })
      tell()
    },
    move() {
      happen.press(true)
      const [place, n] = [random(PLANS.length), ++v.n]
      truth.clear()
      flip(truth, PLANS[place])
      const known = ++events
      const move = { place, n, known }
      desk.change(slider, { moved: n, move: { ...move, seq: desk.clicked() } }, () => wire.push({ move }))
      Object.assign(slider, { tell: true, held: random(2) === 1 })
    },
    press(inSlider) {
      if (!inSlider) desk.flush(slider)
      if (!v.pending.length || v.press?.seq === v.seq) return
      v.press = message()
      tell()
    },
    preset() {
      happen.press()
      truth.clear()
      flip(truth, ["c"])
      wire.push({ preset: ["c"], known: ++events })
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
      const newest = Math.max(v.last ?? 0, desk.move?.known ?? 0)
      if (answer && !fetches.length && shown.known < newest) throw Error(`change ${newest} was not asked`)
      if (answer && !outdated && shown.known < answer.cells.known) throw Error(`the answer to ${answer.cells.known} was not drawn`)
      check("an answer")
    },
    rerun() {
      const came = wire.splice(0, 1 + random(3))
      const last = came.findLast((item) => item.marks)?.marks ?? server.last
      server.last = last
      for (const item of came) {
        if (item.move && item.move.n > server.moved) {
          server.moved = item.move.n
          adopt(last?.press)
          if (!same(PLANS[item.move.place], server.on)) replace(PLANS[item.move.place], item.move.known)
          server.known = Math.max(server.known, item.move.known)
        }
        if (item.preset) (adopt(last?.press), replace(item.preset, item.known))
      }
      adopt(last)
      keys = { ...server, on: new Set(server.on) }
      reruns.push(keys)
    },
    drawn() {
      const data = reruns.shift()
      if (!data) return
      const about = { desk: "graph", seq: data.seq, moved: data.moved, line: null }
      if (!desk.isAhead(about)) show(data.known, data.on, "a rerun")
      const isNew = v.revision !== data.revision
      v.served = data.on
      v.pending = v.pending.filter(({ seq }) => seq > data.seq)
      if (v.press && v.press.seq <= data.seq) v.press = null
      v.seq = Math.max(v.seq, data.seq)
      v.revision = data.revision
      const isAhead = desk.heard(about, hooks)
      if (!desk.move) v.on = new Set(marked())
      if (!isAhead || isNew) fetches.forEach((one) => { one.outdated = true })
      if (isAhead && isNew) desk.askAgain()
    },
  }
  // The marks that the browser shows are those of the last change that it has heard of, whoever drew them.
  function check(who) {
    if (!desk.move && !same(v.on, marked())) throw Error(`${who} left ${[...v.on]}, and the marks are ${marked()}`)
  }
  const replacementIsOnItsWay = () => wire.some((item) => item.preset || item.move)
  return { happen, log, replacementIsOnItsWay, end: async () => {
    for (let i = 0; i < 40; i++) {
      happen.tick()
      await happen.answered()
      if (wire.length || i === 39) happen.rerun()
      happen.drawn()
    }
    while (reruns.length) happen.drawn()
    for (const [what, on] of [["the page", server.on], ["the strip", shown.on], ["the graph", v.on]])
      if (!same(on, truth)) throw Error(`${what} has ${[...on]}, and ${[...truth]} was chosen`)
  } }
}

const KINDS = ["click", "click", "click", "move", "fold", "press", "preset", "tick", "answered", "answered", "rerun", "rerun", "drawn", "drawn"]
for (let run = 0; run < n_runs; run++) {
  const { happen, log, end, replacementIsOnItsWay } = world()
  const names = []
  try {
    happen.rerun()
    happen.drawn()
    for (let i = 0; i < 5 + random(30); i++) {
      const kind = KINDS[random(KINDS.length)]
      names.push(kind)
      log.push(kind)
      if (kind === "press" && replacementIsOnItsWay()) continue // rule 4 holds one press a rerun
      await happen[kind]()
    }
    await end()
  } catch (error) {
    console.log(`run ${run}: ${error.message}\n${log.join("\n")}`)
    process.exit(1)
  }
}
console.log(`${n_runs} orders`)
