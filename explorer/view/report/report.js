"use strict";
// Drag over a chart to zoom along x, double-click to see all of it again; the pointer reads the nearest moment.
for (const figure of document.querySelectorAll("figure.zooms")) {
  const chart = figure.querySelector("svg.chart"), plot = chart.querySelector("svg.plot");
  const [, , width, height] = plot.getAttribute("viewBox").split(" ").map(Number);
  const left = Number(plot.getAttribute("x")), top = Number(plot.getAttribute("y"));
  const said = figure.querySelector("script") ? JSON.parse(figure.querySelector("script").textContent) : [];
  said.sort((a, b) => a[0] - b[0]);
  const mark = document.createElementNS(chart.namespaceURI, "rect");
  mark.setAttribute("y", top); mark.setAttribute("height", height); mark.setAttribute("fill", "#8A63D2");
  mark.setAttribute("fill-opacity", "0.25"); mark.setAttribute("width", 0);
  chart.append(mark);
  const tip = document.getElementById("tip");
  let from = 0, wide = width, down = null;
  const inPlot = (event) => {
    const box = chart.getBoundingClientRect(), scale = chart.viewBox.baseVal.width / box.width;
    return [(event.clientX - box.left) * scale - left, (event.clientY - box.top) * scale - top];
  };
  const show = (start, size) => {
    from = start; wide = size;
    plot.setAttribute("viewBox", `${from} 0 ${wide} ${height}`);
    for (const part of chart.querySelectorAll("[data-x]:not(.note)")) {
      const x = (Number(part.dataset.x) - from) * width / wide;
      part.style.display = x < -1 || x > width + 1 ? "none" : "";
      if (part.classList.contains("tick")) part.setAttribute("transform", `translate(${x - Number(part.dataset.x)},0)`);
      else part.setAttribute("transform", `translate(${x},${part.dataset.y})`);
    }
  };
  chart.addEventListener("pointerdown", (event) => {
    const [x, y] = inPlot(event);
    if (event.pointerType !== "touch" && x >= 0 && x <= width && y >= 0 && y <= height) { down = x; event.preventDefault(); }
  });
  window.addEventListener("pointerup", (event) => {
    if (down === null) return;
    const x = Math.min(Math.max(inPlot(event)[0], 0), width), low = Math.min(down, x), high = Math.max(down, x);
    down = null; mark.setAttribute("width", 0);
    if (high - low > 6) show(from + low * wide / width, (high - low) * wide / width);
  });
  chart.addEventListener("dblclick", () => show(0, width));
  chart.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  chart.addEventListener("pointermove", (event) => {
    const [x, y] = inPlot(event), inside = x >= 0 && x <= width && y >= 0 && y <= height;
    if (down !== null) {
      const end = Math.min(Math.max(x, 0), width);
      mark.setAttribute("x", left + Math.min(down, end)); mark.setAttribute("width", Math.abs(end - down));
    }
    if (!inside || !said.length) { tip.style.display = "none"; return; }
    const at = from + x * wide / width;
    let best = 0, far = Infinity;
    said.forEach(([place], i) => { const gap = Math.abs(place - at); if (gap < far) { far = gap; best = i; } });
    const near = said.filter(([place]) => place === said[best][0]).map((entry) => entry[1]);
    tip.textContent = [...new Set(near)].join("\n\n");
    tip.style.display = "block";
    const room = window.innerWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, room))}px`;
    tip.style.top = `${Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8)}px`;
  });
}
