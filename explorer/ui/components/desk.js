// Answers a step before Streamlit knows of it. All components of the page share one desk.
//
// 1. Each step of a person (a click in the graph, a preset, undo, a move of the slider) is asked of POST /answer at once.
//    One question is under way; the newest step waits for it. An answer is drawn unless a rerun that knows all has come
//    since it was asked: steps that come faster than answers do not keep the page from following.
// 2. Streamlit is told after REST_MS without a step (later while the slider is held), or at a press outside.
// 3. Each part of a rerun says the last step that it knows (`taken`). A rerun that does not know all of them draws over no
//    answer, and they are asked again, as it may stand on something else. A rerun that does ends the question under way.
// 4. Streamlit sends no part that it believes drawn. `taken` makes each part new, so that what an answer drew does not
//    stay where the rerun has the same as before the step.

const REST_MS = 200
const LOOK_MS = 300 // between two looks whether the chart is there, or another in its place
const PLOT = ".st-key-first .js-plotly-plot"
const SENTENCE = '.st-key-top [data-testid="stMarkdown"] p'
const BUDGET = '.st-key-budget_line [data-testid="stMarkdown"] p'
const TAKE = ".st-key-take_better"
const BAR = ".st-key-bar" // the buttons that run and download the policy
const ALERT = '[data-testid="stBottomBlockContainer"] [data-testid="stAlert"]'
const MARKDOWN =
  /:(\w+)-badge\[:material\/(\w+): ([^\]]*)\]|:(\w+)\[((?:\\.|[^\]\\])*)\]|\*\*((?:\\.|[^*\\])*)\*\*|((?:\\.|[^\\*:]|:(?!\w+(?:-badge)?\[))+)/g
const ICON = "display:inline-block;font-family:'Material Symbols Rounded';user-select:none;vertical-align:bottom"
const SVG = "http://www.w3.org/2000/svg"

function makeDesk() {
  const desk = { key: "", n: 0, graph: null, strip: null, tools: null }
  let number = 0 // grows with each step, and with each rerun that does not know all of them
  let outdated = 0 // the number of the last step whose answer a rerun has overtaken
  let underWay = false
  let untold = false // whether Streamlit has to be told of the steps, and the timer of that
  let rest = 0
  let line = null // of the drawn policy
  let look = 0
  const lists = new Map() // of steps, by the key of the graph
  const covers = [] // what an answer wrote, each with Streamlit's element in its place, which is hidden meanwhile

  async function ask() {
    const asked = number
    const { n } = desk
    underWay = true
    let answer = null
    try {
      const response = await fetch("answer", { method: "POST", body: JSON.stringify(desk.graph.question()) })
      if (response.status === 200) answer = await response.json()
    } catch {} // the rerun answers
    underWay = false
    if (answer && desk.graph && asked > outdated) draw(answer, n)
    if (asked < number && desk.graph && desk.isAhead()) ask()
  }

  function draw(answer, n) {
    desk.strip?.(answer.cells)
    desk.tools?.(answer.tools)
    restore()
    write(SENTENCE, answer.sentence)
    if (answer.budget) write(BUDGET, answer.budget)
    cover(document.querySelector(TAKE), document.createElement("i")) // it takes a plan that beats the policy before
    warn(answer.danger)
    desk.graph.draw(answer, n)
    line = answer.line
    drawLine()
  }

  // Streamlit's own element stays as Streamlit knows it: what is changed in it would stay where Streamlit sees no change.
  function write(place, markdown) {
    const old = document.querySelector(place)
    if (!old?.firstChild?.style) return
    const copy = old.cloneNode(false)
    copy.append(old.firstChild.cloneNode(false))
    copy.firstChild.append(...[...markdown.matchAll(MARKDOWN)].map((match) => words(match, desk)))
    old.after(copy)
    cover(old, copy)
  }
  // A known hazard, beside the buttons that run and download the policy.
  function warn(danger) {
    const [bar, old] = [document.querySelector(BAR), document.querySelector(ALERT)]
    if (!danger && !old) return
    const copy = document.createElement("div")
    copy.textContent = danger.replaceAll(/\\(.)/g, "$1")
    copy.className = "desk-danger"
    if (danger) Object.assign(copy.style, { padding: "16px", borderRadius: "8px", ...tint("red", desk) })
    bar?.before(copy)
    cover(old, copy)
  }
  function cover(old, copy) {
    if (old) old.style.display = "none"
    covers.push({ old, copy })
  }
  function restore() {
    for (const { old, copy } of covers.splice(0)) {
      copy.remove()
      if (old) old.style.display = ""
    }
  }

  // The line lies over Plotly's chart, which takes a tenth of a second to draw itself and does not know of the line.
  function drawLine() {
    const plot = document.querySelector(PLOT)
    const area = plot?.querySelector(".nsewdrag")
    const layer = plot?.querySelector(".desk-line")
    clearTimeout(look)
    if (!line) return layer && (layer.style.display = "none")
    look = setTimeout(drawLineAgain, LOOK_MS)
    if (!area || !plot.layout || !desk.styles) return
    if (!plot.desk) plot.on("plotly_afterplot", drawLine)
    plot.desk = true
    place(layer ?? makeLayer(plot, area), plot.layout, area, { ...line, ...pageColours(desk) })
  }

  function drawLineAgain() {
    if (!document.querySelector(`${PLOT} .desk-line`)) return drawLine()
    look = setTimeout(drawLineAgain, LOOK_MS)
  }

  desk.isAhead = (about = desk.known) => about?.desk === desk.key && about.taken < desk.n

  // A step for the graph's list, of another component.
  desk.act = (step, rest) => desk.graph?.act(step, rest)

  // The steps of the graph `key` that a rerun with `taken` does not know, with the steps of an early graph before it.
  desk.listOf = ({ desk: key, taken }) => {
    if (lists.has(key)) return lists.get(key)
    const steps = (desk.graph?.takeOver() ?? []).map((step, i) => ({ ...step, n: taken + i + 1 }))
    const list = { steps, n: taken + steps.length, press: 0 }
    lists.set(key, list)
    return list
  }

  // The graph's list ends with step `n`.
  desk.changed = (n, rest_ms = REST_MS) => {
    desk.n = n
    number++
    untold = true
    clearTimeout(rest)
    rest = setTimeout(desk.flush, rest_ms)
    if (!underWay) ask()
  }
  desk.flush = () => {
    if (untold) desk.graph?.tell()
  }
  desk.isTold = () => {
    clearTimeout(rest)
    untold = false
  }

  // A rerun has drawn the graph. Returns whether steps are under way that it does not know.
  desk.heard = (about, graph) => {
    if (about.desk !== desk.key) {
      Object.assign(desk, { key: about.desk, n: 0 })
      line = null
    }
    Object.assign(desk, { graph, known: about })
    if (desk.isAhead()) return true
    outdated = number
    restore()
    line = about.line
    drawLine()
    return false
  }
  desk.askAgain = () => {
    number++
    if (!underWay) ask()
  }
  desk.leave = (graph) => {
    if (desk.graph !== graph) return
    desk.graph = line = null
    drawLine()
    restore()
    outdated = number
  }
  return desk
}

// Badges, bold words and escaped text, as Streamlit draws them; text reaches the page through textContent alone.
function words([, colour, icon, badge, hue, tinted, bold, plain], desk) {
  const make = (tag, text) => Object.assign(document.createElement(tag), { textContent: text.replaceAll(/\\(.)/g, "$1") })
  if (bold !== undefined) return make("strong", bold)
  if (plain !== undefined) return plain.replaceAll(/\\(.)/g, "$1")
  if (hue !== undefined) return Object.assign(make("span", tinted), { style: `color:${tint(hue, desk).color}` })
  const [made, sign] = [make("span", ` ${badge}`), make("span", icon)]
  made.className = "stMarkdownBadge"
  Object.assign(made.style, { fontSize: "0.875rem", ...tint(colour, desk) })
  sign.style.cssText = ICON
  made.prepend(sign)
  return made
}

// Asked for once a rerun: the browser would compute the style of what an answer has just written.
function tint(colour, { styles, tints }) {
  const of = (name) => styles.getPropertyValue(`--st-${colour}-${name}-color`)
  return (tints[colour] ??= { backgroundColor: of("background"), color: of("text") })
}

// Of the page, which is light or dark. Asked for once a rerun, as `tint` is.
function pageColours({ styles, tints }) {
  return (tints.page ??= { ground: styles.getPropertyValue("--st-background-color"), ink: styles.getPropertyValue("--st-text-color") })
}

// The layer gets its nodes once, and only attributes and letters change from then on: at each new node Streamlit looks for
// a control to focus in the whole tab, and has the browser lay out the page for that.
function makeLayer(plot, area) {
  const layer = document.createElementNS(SVG, "svg")
  for (const name of ["path", "path", "rect", "text"]) layer.append(document.createElementNS(SVG, name))
  const [halo, path, behind, text] = layer.children
  layer.setAttribute("class", "desk-line")
  set(halo, { fill: "none", "stroke-opacity": 0.85, "stroke-width": 5 })
  set(path, { fill: "none", "stroke-width": 2, "stroke-dasharray": "9 9" })
  set(behind, { height: 18 })
  set(text, { "font-family": area.ownerSVGElement.querySelector("text").style.fontFamily, "text-anchor": "middle", "font-size": 12 })
  text.append("")
  ;[...plot.querySelectorAll(".main-svg")].at(-1).before(layer)
  return layer
}

function set(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value)
}

function place(layer, { xaxis, yaxis }, area, { x, heights, peak, label, colour, ground, ink }) {
  const [halo, path, behind, text] = layer.children
  const [x0, y0, width, height] = ["x", "y", "width", "height"].map((name) => Number(area.getAttribute(name)))
  const across = (value) => (((value - xaxis.range[0]) / (xaxis.range[1] - xaxis.range[0])) * width).toFixed(1)
  const share = (value) => (value - yaxis.range[0]) / (yaxis.range[1] - yaxis.range[0])
  const down = (value) => (height * (1 - Math.min(share(value), 1))).toFixed(1)
  layer.style.cssText = `position:absolute;overflow:hidden;pointer-events:none;left:${x0}px;top:${y0}px;width:${width}px;height:${height}px`
  const d = x.map((tick, i) => (i ? `H${across(tick)}V` : `M${across(tick)},`) + down(heights[i])).join("")
  set(halo, { d, stroke: ground })
  set(path, { d, stroke: colour })
  const wide = 5.5 * label.length + 4
  const left = Math.max(wide / 2, Math.min(Number(across(peak[0])), width - wide / 2))
  const top = Math.max(Number(down(peak[1])) - 14, 9)
  set(behind, { x: left - wide / 2, y: top - 9, width: wide, fill: ground })
  set(text, { x: left, y: top + 4, fill: ink })
  text.firstChild.data = label
}

globalThis.explorerDesk ??= makeDesk()
