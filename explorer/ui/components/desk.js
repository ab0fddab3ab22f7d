// Answers a click before Streamlit knows of it. All components of the page share one desk.
//
// 1. Each change of a person (a click in the graph, a move of the slider) is asked of POST /answer at once. One question
//    is under way; the newest change waits for it. An answer is drawn unless a rerun that knows all has come since it
//    was asked: changes that come faster than answers do not keep the page from following.
// 2. Streamlit is told after REST_MS without a change (HELD_MS while the slider is held), or at a press outside.
// 3. Each part of a rerun says which clicks and which move it knows (`seq`, `moved`). A rerun that does not know all of
//    them draws over no answer. A rerun that does ends the question under way.
// 4. Streamlit sends no part that it believes drawn. `seq` and `moved` make each part new, so that what an answer drew
//    does not stay where the rerun has the same as before the click.

const REST_MS = 200
const HELD_MS = 1000 // a rerun takes a slow machine half a second, in which the page does not follow the slider
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
  const desk = { key: "", seq: 0, moved: 0, move: null, graph: null, strip: null }
  let number = 0 // grows with each change
  let outdated = 0 // the number of the last change whose answer a rerun has overtaken
  let underWay = false
  let untold = null // what tells Streamlit of the last change of a component, and its timer
  let rest = 0
  let line = null // of the drawn policy
  let look = 0
  const covers = [] // what an answer wrote, each with Streamlit's element in its place, which is hidden meanwhile

  async function ask() {
    const asked = number
    const { seq } = desk
    underWay = true
    let answer = null
    try {
      const response = await fetch("answer", { method: "POST", body: JSON.stringify(desk.graph.marks()) })
      if (response.status === 200) answer = await response.json()
    } catch {} // the rerun answers
    underWay = false
    if (answer && desk.graph && asked > outdated) draw(answer, seq)
    if (asked < number && desk.graph && desk.isAhead()) ask()
  }

  function draw(answer, seq) {
    desk.strip?.(answer.cells)
    restore()
    write(SENTENCE, answer.sentence)
    if (answer.budget) write(BUDGET, answer.budget)
    cover(document.querySelector(TAKE), document.createElement("i")) // it takes a plan that beats the policy before
    warn(answer.danger)
    desk.graph.draw(answer, seq)
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
    if (!area || !plot.layout) return
    if (!plot.desk) plot.on("plotly_afterplot", drawLine)
    plot.desk = true
    place(layer ?? makeLayer(plot, area), plot.layout, area, line)
  }

  function drawLineAgain() {
    if (!document.querySelector(`${PLOT} .desk-line`)) return drawLine()
    look = setTimeout(drawLineAgain, LOOK_MS)
  }

  desk.isAhead = (about = desk.known) =>
    about?.desk === desk.key && (about.seq < desk.seq || about.moved < desk.moved)

  // `who`: the component; `what`: its click or move; `tell` hands that to Streamlit.
  desk.change = (who, what, tell) => {
    if (untold && untold.who !== who) desk.flush(untold.who)
    Object.assign(desk, what)
    number++
    untold = { who, tell }
    clearTimeout(rest)
    rest = setTimeout(desk.flush, who.held ? HELD_MS : REST_MS, who)
    if (desk.graph && !underWay) ask()
  }
  desk.flush = (who) => {
    if (untold?.who !== who) return
    const { tell } = untold
    desk.isTold(who)
    tell()
  }
  desk.isTold = (who) => {
    if (untold?.who !== who) return
    clearTimeout(rest)
    untold = null
  }
  desk.clicked = () => desk.graph?.seq() ?? 0

  // A rerun has drawn the graph. Returns whether changes are under way that it does not know.
  desk.heard = (about, graph) => {
    if (about.desk !== desk.key) {
      Object.assign(desk, { key: about.desk, seq: 0, moved: 0, move: null })
      line = null
    }
    Object.assign(desk, { graph, known: about })
    if (desk.move && about.moved >= desk.move.n) desk.move = null
    if (desk.isAhead()) return true
    outdated = number
    restore()
    line = about.line
    drawLine()
    return false
  }
  desk.askAgain = () => {
    outdated = number++
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

// The layer gets its nodes once, and only attributes and letters change from then on: at each new node Streamlit looks for
// a control to focus in the whole tab, and has the browser lay out the page for that.
function makeLayer(plot, area) {
  const layer = document.createElementNS(SVG, "svg")
  for (const name of ["path", "path", "rect", "text"]) layer.append(document.createElementNS(SVG, name))
  const [halo, path, ground, text] = layer.children
  layer.setAttribute("class", "desk-line")
  set(halo, { fill: "none", stroke: "rgba(255,255,255,.85)", "stroke-width": 5 })
  set(path, { fill: "none", "stroke-width": 2, "stroke-dasharray": "9 9" })
  set(ground, { height: 18, fill: "#fff" })
  set(text, { "font-family": area.ownerSVGElement.querySelector("text").style.fontFamily, "text-anchor": "middle", "font-size": 12 })
  text.append("")
  ;[...plot.querySelectorAll(".main-svg")].at(-1).before(layer)
  return layer
}

function set(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value)
}

function place(layer, { xaxis, yaxis }, area, { x, heights, peak, label, colour }) {
  const [halo, path, ground, text] = layer.children
  const [x0, y0, width, height] = ["x", "y", "width", "height"].map((name) => Number(area.getAttribute(name)))
  const across = (value) => (((value - xaxis.range[0]) / (xaxis.range[1] - xaxis.range[0])) * width).toFixed(1)
  const share = (value) => (value - yaxis.range[0]) / (yaxis.range[1] - yaxis.range[0])
  const down = (value) => (height * (1 - Math.min(share(value), 1))).toFixed(1)
  layer.style.cssText = `position:absolute;overflow:hidden;pointer-events:none;left:${x0}px;top:${y0}px;width:${width}px;height:${height}px`
  const d = x.map((tick, i) => (i ? `H${across(tick)}V` : `M${across(tick)},`) + down(heights[i])).join("")
  set(halo, { d })
  set(path, { d, stroke: colour })
  const wide = 5.5 * label.length + 4
  const left = Math.max(wide / 2, Math.min(Number(across(peak[0])), width - wide / 2))
  const top = Math.max(Number(down(peak[1])) - 14, 9)
  set(ground, { x: left - wide / 2, y: top - 9, width: wide })
  set(text, { x: left, y: top + 4, fill: colour })
  text.firstChild.data = label
}

globalThis.explorerDesk ??= makeDesk()
