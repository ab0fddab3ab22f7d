// Looks for news of a job several times a second, and has Streamlit draw them: its own timer fires once a second, and
// late in a browser that draws a chart. A look costs the server a tenth of what drawing costs.
const views = new WeakMap()
const LOOK_MS = 150
const AGAIN_MS = 1000 // until the page knows, it is told again: what is told while Streamlit draws may be lost
const LONGEST_MS = 5000

async function look(v) {
  if (v.isLooking) return
  v.isLooking = true
  const { job } = v
  try {
    const answer = await fetch(`news?job=${encodeURIComponent(job)}`, { signal: AbortSignal.timeout(LONGEST_MS) })
    const n = answer.ok ? Number(await answer.text()) : 0
    const now = performance.now()
    // Another job may have begun meanwhile, and its news are counted from 0.
    if (job === v.job && (n > v.told || (n > v.n && now > v.again))) {
      Object.assign(v, { told: n, again: now + AGAIN_MS })
      v.tell("news", now)
    }
  } catch {} // Streamlit's timer draws the page
  v.isLooking = false
}

export default function ({ data: [data], parentElement, setStateValue }) {
  let v = views.get(parentElement)
  if (!v) {
    v = {}
    v.timer = setInterval(look, LOOK_MS, v)
    views.set(parentElement, v)
  }
  Object.assign(v, data, { told: data.n, tell: setStateValue })
  return () => {
    if (parentElement.isConnected) return // rule 7 of graph.js
    clearInterval(v.timer)
    views.delete(parentElement)
  }
}
