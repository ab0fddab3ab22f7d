// Every text node in sight, shadow roots included: its colour over the grounds of its ancestors, opacity counted.
// Text in a drawing stands on the last shape drawn before it that holds its centre; over a pattern it is left out.
() => {
  const parsed = (text) => {
    const numbers = text.match(/^rgba?\(([^)]+)\)/)?.[1].split(/[ ,/]+/).map(Number)
    return numbers && [...numbers.slice(0, 3), numbers[3] ?? 1]
  }
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1)
  const luminance = (colour) => {
    const [r, g, b] = colour.map((value) => value / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
  }
  const parent = (element) => element.assignedSlot ?? element.parentElement ?? element.getRootNode().host ?? null
  const chain = (element) => (element ? [...chain(parent(element)), element] : [])

  const shapeUnder = (text, box) => {
    const plot = text.closest(".js-plotly-plot") ?? text.ownerSVGElement
    const [x, y] = [box.x + box.width / 2, box.y + box.height / 2]
    let ground = null
    for (const shape of plot.querySelectorAll("path, rect, polygon, circle")) {
      if (!(shape.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_FOLLOWING)) continue
      const { fill, fillOpacity, opacity, stroke } = getComputedStyle(shape)
      const at = shape.getBoundingClientRect()
      if (fill === "none" || x < at.left || x > at.right || y < at.top || y > at.bottom) continue
      const colour = parsed(fill)
      if (!colour) return "pattern"
      colour[3] *= fillOpacity * opacity
      if (colour[3] > 0) ground = colour
    }
    return ground
  }

  const ofDisabled = (label) => label.dataset?.testid === "stWidgetLabel" && label.parentElement.querySelector(":disabled")

  const found = []
  const look = (root) => {
    const nodes = document.createTreeWalker(root, NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_TEXT)
    for (let node = nodes.nextNode(); node; node = nodes.nextNode()) {
      if (node.shadowRoot) look(node.shadowRoot)
      const element = node.parentElement
      if (node.nodeType !== Node.TEXT_NODE || !node.data.trim() || !element || element.closest("style, script, noscript")) continue
      const range = document.createRange()
      range.selectNodeContents(node)
      const box = range.getBoundingClientRect()
      const style = getComputedStyle(element)
      if (box.width < 2 || box.height < 2 || style.visibility === "hidden") continue
      const line = chain(element)
      const opacity = line.reduce((all, one) => all * getComputedStyle(one).opacity, 1)
      const drawn = element.namespaceURI.endsWith("svg")
      const ink = parsed(drawn ? style.fill : style.color)
      if (!ink || opacity === 0) continue
      let ground = [255, 255, 255, 1]
      for (const one of line) ground = over(parsed(getComputedStyle(one).backgroundColor) ?? [0, 0, 0, 0], ground)
      const shape = drawn ? shapeUnder(element, box) : null
      if (shape === "pattern") continue
      if (shape) ground = over(shape, ground)
      ink[3] *= opacity * (drawn ? style.fillOpacity : 1)
      const shown = over(ink, ground)
      const [dark, light] = [luminance(shown), luminance(ground)].sort((a, b) => a - b)
      found.push({
        text: node.data.trim().slice(0, 60),
        ratio: (light + 0.05) / (dark + 0.05),
        ink: shown.slice(0, 3).map(Math.round).join(" "),
        ground: ground.slice(0, 3).map(Math.round).join(" "),
        sign: style.fontFamily.includes("Material Symbols") || !/\p{L}|\p{N}/u.test(node.data),
        disabled: line.some((one) => one.disabled || one.ariaDisabled === "true" || ofDisabled(one)),
      })
    }
  }
  look(document.body)
  return found
}
