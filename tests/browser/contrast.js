// Every text node in sight, shadow roots included: its colour over the grounds of its ancestors, opacity counted.
// Text in a drawing stands on the last shape drawn before it that holds its centre; over a pattern it is left out.
// What is read of an element is read once: a page has a thousand texts, and each has twenty ancestors.
// What fades in, as a tooltip does, is measured as it will stand.
() => {
  for (const fade of document.getAnimations()) if (fade.effect?.getComputedTiming().endTime < Infinity) fade.finish()
  const once = (read) => {
    const known = new Map()
    return (element) => known.get(element) ?? known.set(element, read(element)).get(element)
  }
  const styleOf = once(getComputedStyle)
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
  const groundOf = once((element) => {
    const below = parent(element)
    return over(parsed(styleOf(element).backgroundColor) ?? [0, 0, 0, 0], below ? groundOf(below) : [255, 255, 255, 1])
  })
  const opacityOf = once((element) => {
    const below = parent(element)
    return styleOf(element).opacity * (below ? opacityOf(below) : 1)
  })
  const shapesOf = once((plot) =>
    [...plot.querySelectorAll("path, rect, polygon, circle")].flatMap((shape) => {
      const { fill, fillOpacity, opacity } = getComputedStyle(shape)
      return fill === "none" ? [] : [{ shape, at: shape.getBoundingClientRect(), colour: parsed(fill), share: fillOpacity * opacity }]
    }),
  )

  const shapeUnder = (text, box) => {
    const plot = text.closest(".js-plotly-plot") ?? text.ownerSVGElement
    const [x, y] = [box.x + box.width / 2, box.y + box.height / 2]
    let ground = null
    for (const { shape, at, colour, share } of shapesOf(plot)) {
      if (x < at.left || x > at.right || y < at.top || y > at.bottom) continue
      if (!(shape.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_FOLLOWING)) continue
      if (!colour) return "pattern"
      if (colour[3] * share > 0) ground = [...colour.slice(0, 3), colour[3] * share]
    }
    return ground
  }

  const ofDisabled = (label) => label.dataset?.testid === "stWidgetLabel" && label.parentElement.querySelector(":disabled")

  const isDisabled = once((element) => {
    const below = parent(element)
    const own = element.disabled || element.ariaDisabled === "true" || ofDisabled(element)
    return Boolean(own) || (below !== null && isDisabled(below))
  })

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
      const style = styleOf(element)
      if (box.width < 2 || box.height < 2 || style.visibility === "hidden") continue
      const opacity = opacityOf(element)
      const drawn = element.namespaceURI.endsWith("svg")
      const ink = parsed(drawn ? style.fill : style.color)
      if (!ink || opacity === 0) continue
      let ground = groundOf(element)
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
        disabled: isDisabled(element),
      })
    }
  }
  look(document.body)
  return found
}
