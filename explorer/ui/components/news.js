// Looks for news of a job several times a second, and has Streamlit draw them: its own timer fires once a second, and
// late in a browser that draws a chart. A look costs the server a tenth of what drawing costs.
const views = new WeakMap()
const LOOK_MS = 150

async function look(v) {
  if (v.isLooking) return
  v.isLooking = true
  try {
    const answer = await fetch(`news?job=${encodeURIComponent(v.job)}`)
    const n = answer.ok ? Number(await answer.text()) : 0
    if (n > v.n) v.tell("news", (v.n = n))
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
  Object.assign(v, data, { tell: setStateValue })
  return () => {
    if (parentElement.isConnected) return // rule 7 of graph.js
    clearInterval(v.timer)
    views.delete(parentElement)
  }
}
