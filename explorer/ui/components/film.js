// Plays the frames of a step: a line over the chart, words beside it, and in the graph what each block holds.
// graph.js listens to the event "step-frame". The line is drawn over Plotly's figure, which takes 90 ms to move one.
const views = new WeakMap()
const FILM_MS = 12000
const [LEAST_MS, MOST_MS] = [40, 400] // of a frame

function plotOf() {
  const plane = document.querySelector(".st-key-first .nsewdrag")
  const figure = plane?.closest(".js-plotly-plot")
  return figure?._fullLayout ? { axis: figure._fullLayout.xaxis, box: plane.getBoundingClientRect() } : null
}

function heldAt(film, at) {
  const held = film.rows.map(() => 0)
  for (const { changes } of film.frames.slice(0, at + 1)) for (const [row, bytes] of changes) held[row] = bytes
  return held
}

function wordsOf(film, at) {
  const { phase, row, held } = film.frames[at]
  return `${phase}${row === null ? "" : ` of ${film.rows[row][0]}`}: ${held} held`
}

function show(v) {
  const { film, at, parts } = v
  const plot = plotOf()
  const isShown = v.isOpen && plot !== null
  parts.over.hidden = !isShown
  for (const key of [parts.back, parts.on, parts.close]) key.hidden = !v.isOpen
  parts.play.textContent = v.timer ? "❚❚ Pause" : "▶ Play"
  if (!v.isOpen) return document.dispatchEvent(new CustomEvent("step-frame", { detail: null }))
  const words = wordsOf(film, at)
  if (isShown) {
    const host = parts.over.parentElement.getBoundingClientRect()
    const x = Math.min(Math.max(plot.axis.d2p(film.frames[at].x), 0), plot.box.width)
    parts.over.style.cssText = `left:${plot.box.left - host.left}px;top:${plot.box.top - host.top}px;`
      + `width:${plot.box.width}px;height:${plot.box.height}px`
    parts.over.style.setProperty("--x", `${x}px`)
    parts.over.style.setProperty("--phase", film.colours[film.frames[at].phase] || "currentColor")
    parts.over.classList.toggle("late", x > plot.box.width / 2)
  }
  parts.words.textContent = words
  parts.track.setAttribute("aria-valuemax", film.frames.length - 1)
  parts.track.setAttribute("aria-valuenow", at)
  parts.track.setAttribute("aria-valuetext", words)
  const held = heldAt(film, at)
  const rows = film.rows.map(([, fqns], i) => ({ fqns, held: held[i], most: film.most[i] }))
  const { phase, row } = film.frames[at]
  document.dispatchEvent(new CustomEvent("step-frame", { detail: { phase, colour: film.colours[phase], row, rows } }))
}

function pause(v) {
  clearTimeout(v.timer)
  v.timer = null
}

function go(v, at) {
  pause(v)
  Object.assign(v, { isOpen: true, at: Math.min(Math.max(at, 0), v.film.frames.length - 1) })
  show(v)
}

function play(v) {
  const last = v.film.frames.length - 1
  if (v.timer) return go(v, v.at)
  const next = !v.isOpen || v.at === last ? 0 : v.at + 1
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return go(v, next)
  const each = Math.min(Math.max(FILM_MS / (last + 1), LEAST_MS), MOST_MS)
  const turn = (at) => {
    v.timer = at < last ? setTimeout(turn, each, at + 1) : null
    Object.assign(v, { isOpen: true, at })
    show(v)
  }
  turn(next)
}

function close(v) {
  pause(v)
  v.isOpen = false
  show(v)
}

function nearest(v, event) {
  const { axis, box } = plotOf()
  const far = v.film.frames.map(({ x }) => Math.abs(axis.d2p(x) - (event.clientX - box.left)))
  go(v, far.indexOf(Math.min(...far)))
}

const MOVES = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, Home: -Infinity, End: Infinity }

function onKey(v, event) {
  if (event.key === "Escape" && v.isOpen) return close(v)
  if (event.target !== v.parts.track || !(event.key in MOVES)) return
  event.preventDefault()
  go(v, v.at + MOVES[event.key])
}

export default function ({ data: [film], parentElement }) {
  let v = views.get(parentElement)
  if (!v) {
    const part = (name) => parentElement.querySelector(`.${name}`)
    const names = ["play", "back", "on", "close", "over", "words", "track"]
    v = { at: 0, isOpen: false, timer: null, parts: Object.fromEntries(names.map((name) => [name, part(name)])) }
    v.parts.play.onclick = () => play(v)
    v.parts.back.onclick = () => go(v, v.at - 1)
    v.parts.on.onclick = () => go(v, v.at + 1)
    v.parts.close.onclick = () => close(v)
    v.parts.track.onpointerdown = (event) => v.parts.track.setPointerCapture(event.pointerId)
    v.parts.track.onpointermove = (event) => event.buttons && nearest(v, event)
    v.parts.track.onclick = (event) => nearest(v, event)
    part("film").onkeydown = (event) => onKey(v, event)
    v.onscroll = () => v.isOpen && show(v)
    for (const kind of ["scroll", "resize"]) window.addEventListener(kind, v.onscroll, true)
    views.set(parentElement, v)
  }
  const isOther = v.film && JSON.stringify(v.film) !== JSON.stringify(film)
  v.film = film
  if (isOther && v.isOpen) close(v)
  v.at = isOther ? 0 : v.at
  return () => {
    if (parentElement.isConnected) return // rule 6 of graph.js
    close(v)
    for (const kind of ["scroll", "resize"]) window.removeEventListener(kind, v.onscroll, true)
    views.delete(parentElement)
  }
}
