// Drives components/news.js, the real one, through random orders of news, late answers, lost requests and new jobs.
import { readFileSync } from "node:fs"

const [file, n_runs] = [process.argv[2], Number(process.argv[3])]
const source = readFileSync(file, "utf8").replace("export default", "return")
const settle = () => new Promise((done) => setImmediate(done))
let seed = 1
const random = (n) => (seed = (seed * 48271) % 2147483647) % n

async function run(n_events) {
  const jobs = [{ n: 0, ended: false }] // on the server; the page follows the last
  const fetches = []
  const log = []
  let [now, look, reruns] = [0, () => {}, 0]
  const fake = {
    setInterval: (act, ms, v) => (look = () => ((now += ms), act(v))),
    clearInterval: () => {},
    performance: { now: () => now },
    AbortSignal: { timeout: () => null },
    fetch: (url) => new Promise((done, fail) => fetches.push({ job: Number(url.split("=")[1]), done, fail })),
  }
  const component = new Function(...Object.keys(fake), source)(...Object.values(fake))
  const parentElement = { isConnected: true }
  const page = { job: 0, n: 0 }

  let fault = "" // an error that the component's own try would hide
  const tell = () => {
    if (page.n === jobs[page.job].n) fault = `the page knows all ${page.n} news and is told of more`
    if (random(3)) reruns++ // else Streamlit drops the request
  }
  const rerun = () => {
    if (jobs[page.job].ended && page.n === jobs[page.job].n) return
    if (jobs[page.job].ended) jobs.push({ n: 0, ended: false })
    Object.assign(page, { job: jobs.length - 1, n: jobs.at(-1).n })
    component({ data: [{ ...page }], parentElement, setStateValue: tell })
  }
  const answer = ({ job, done }) => done({ ok: job in jobs, text: async () => String(jobs[job].n) })
  const happen = {
    look: () => look(),
    news: () => jobs.at(-1).n++,
    end: () => (jobs.at(-1).ended ||= !!++jobs.at(-1).n),
    answer: () => fetches.length && answer(fetches.splice(random(fetches.length), 1)[0]),
    fail: () => fetches.shift()?.fail(Error("aborted")),
    rerun: () => reruns && (reruns--, rerun()),
    visit: () => rerun(), // the person's own step draws the page
  }
  component({ data: [{ ...page }], parentElement, setStateValue: tell })
  for (let i = 0; i < n_events; i++) {
    const name = Object.keys(happen)[random(7)]
    log.push(name)
    happen[name]()
    await settle()
  }
  for (let i = 0; i < 200 && page.n < jobs.at(-1).n; i++) {
    look()
    fetches.splice(0).forEach(answer)
    await settle()
    while (reruns) happen.rerun()
  }
  if (page.n < jobs.at(-1).n) fault ||= `the page knows ${page.n} of ${jobs.at(-1).n} news`
  if (fault) throw Error(`${fault}\n${log.join("\n")}`)
}

for (let i = 0; i < n_runs; i++) await run(5 + random(60))
console.log(`${n_runs} orders`)
