// Where the pointer is over a chart, the values there are written beside its title.
for (const figure of document.querySelectorAll(".chart")) {
  const svg = figure.querySelector("svg"), read = figure.querySelector(".read"), cursor = figure.querySelector(".cursor");
  const { left, right, first, last } = Object.fromEntries(Object.entries(svg.dataset).map(([key, text]) => [key, +text]));
  const lines = [...svg.querySelectorAll("polyline")].map((line) => ({
    name: line.dataset.name,
    values: line.dataset.values.split(" ").map((pair) => pair.split(",").map(Number)),
  }));
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const epoch = first + (Math.min(Math.max(x, left), right) - left) / (right - left) * (last - first);
    const near = lines.map(({ name, values }) => {
      const [, value] = values.reduce((a, b) => (Math.abs(b[0] - epoch) < Math.abs(a[0] - epoch) ? b : a));
      return lines.length > 1 ? `${name} ${value}` : `${value}`;
    });
    read.textContent = `epoch ${epoch.toPrecision(3)}: ${near.join(", ")}`;
    cursor.setAttribute("d", `M${Math.min(Math.max(x, left), right)} 12V186`);
  });
  svg.addEventListener("pointerleave", () => { read.textContent = ""; cursor.setAttribute("d", ""); });
}
