// An earlier run, drawn in the document where the page draws it later: Streamlit's scripts take the browser a second.
// `parts` (components/__init__.py) has a part's style and HTML, and the function that draws its data.
const LONGEST_MS = 20000
const NARROW = 900 // as in graph.js
const ROOM = 1100 // pixels of width from which the page's parts stand where preview.css puts them
const preview = document.getElementById("preview")
const there = (selector) => document.querySelector(selector) !== null
const PAGE_GRAPH = '[class*="st-key-block_graph"]' // none where no model was read
const has = (part, inside) => [...document.querySelectorAll(`${part} *`)].some((e) => e.shadowRoot?.querySelector(inside))

function isOver() {
  const isDrawn = (!there(PAGE_GRAPH) || has(PAGE_GRAPH, ".graph > *")) && there(".sketch > svg, .main-svg")
  const isElsewhere = there('[data-testid="stMarkdown"]') && !there(".st-key-top")
  return isDrawn || isElsewhere || there('[data-testid="stException"], [role="dialog"]')
}

function draw(part, data, height) {
  const host = document.createElement("div")
  host.dataset.part = part
  host.inert = host.ariaHidden = ["strip", "chart"].includes(part)
  if (height) host.style.height = `${height}px`
  const root = host.attachShadow({ mode: "open" })
  root.innerHTML = parts[part].html
  preview.append(host)
  parts[part].draw({ data: [data], parentElement: root, setStateValue() {} })
}

function wait() {
  if (!isOver() && performance.now() < LONGEST_MS) return requestAnimationFrame(wait)
  preview.remove()
}

async function begin() {
  const query = new URLSearchParams(location.search)
  query.set("dark", +matchMedia("(prefers-color-scheme: dark)").matches)
  const answer = await fetch(`preview?${query}`)
  if (answer.status !== 200 || isOver() || there(PAGE_GRAPH)) return // the page's graph takes clicks over only once
  const { origin, words, strip, tools, slider, graph, chart, height } = await answer.json()
  const [mark, line] = preview.querySelectorAll("mark, i")
  mark.textContent = origin
  line.textContent = words
  draw("strip", strip)
  draw("chart", { drawing: chart, loaded: true }, height)
  if (tools) draw("tools", tools)
  if (slider) draw("slider", slider)
  draw("graph", graph)
  wait()
}

document.cookie = `window=${innerHeight}.${+(innerWidth < NARROW)}; SameSite=Strict`
if (innerWidth >= ROOM) begin()
