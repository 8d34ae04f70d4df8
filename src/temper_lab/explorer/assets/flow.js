// The streams of a token through depth: what each takes from which (res), what is read (pre) and written (post).
const SVG = "http://www.w3.org/2000/svg";
const FLOW = { step: 104, lane: 30, top: 74, left: 30 };

function svg(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function flowFigure(reading, names, token, chosen, choose) {
  const { streams: n } = reading;
  const { step, lane, top, left } = FLOW;
  // Many streams are drawn closer together.
  const gap = Math.max(14, Math.min(lane, 150 / n));
  const y = (stream) => top + stream * gap;
  const widest = gap * 0.42;
  const [width, height] = [left + names.length * step + 26, y(n - 1) + gap];
  const figure = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", class: "rx-flow" });
  // On small screens it scrolls instead of shrinking away; on large ones it does not become a poster.
  figure.style.minWidth = `${width * 0.8}px`;
  figure.style.maxWidth = `${width * 1.5}px`;
  figure.setAttribute("aria-label", "Streams through depth");
  const hue = (stream) => `--hue:${Math.round((250 + (360 * stream) / n) % 360)}`;
  for (let s = 0; s < n; s++) figure.append(svg("text", { x: 8, y: y(s) + 4, class: "rx-lane" }, String(s)));
  names.forEach((name, site) => {
    const [from, to] = [left + site * step, left + (site + 1) * step];
    const middle = (from + to) / 2;
    const [pre, res, post] = ["pre", "res", "post"].map((part) => reading.values(site, part, token));
    const group = svg("g", {});
    const line = (d, weight, name, extra, tip) => {
      const size = Math.abs(weight);
      if (size < 0.004) return;
      const path = svg("path", { d, class: `${name}${weight < 0 ? " rx-minus" : ""}`, style: extra, "data-tip": tip });
      path.setAttribute("stroke-width", Math.max(0.6, Math.min(1.5, size) * widest));
      path.setAttribute("stroke-opacity", Math.min(1, 0.12 + size).toFixed(3));
      group.append(path);
    };
    // The strongest last, so that nothing hides it.
    const order = Array.from(res.keys()).sort((a, b) => Math.abs(res[a]) - Math.abs(res[b]));
    for (const k of order) {
      const [m, s] = [Math.floor(k / n), k % n];
      const d = `M${from} ${y(s)}C${middle} ${y(s)} ${middle} ${y(m)} ${to} ${y(m)}`;
      const said = `res[${m}, ${s}] = ${exact(res[k])}\n${name}: stream ${m} takes this much of stream ${s}`;
      line(d, res[k], "rx-ribbon", hue(s), said);
    }
    for (let s = 0; s < n; s++) {
      const reads = `M${from} ${y(s)}C${from + step * 0.2} ${y(s)} ${middle - 22} ${y(s) - 20} ${middle - 15} 42`;
      line(reads, pre[s] / 2, "rx-read", hue(s), `pre[${s}] = ${exact(pre[s])}\n${name} reads this much of stream ${s}`);
      const writes = `M${middle + 15} 42C${middle + 22} ${y(s) - 20} ${to - step * 0.2} ${y(s)} ${to} ${y(s)}`;
      line(writes, post[s] / 4, "rx-write", hue(s), `post[${s}] = ${exact(post[s])}\n${name} writes this much to stream ${s}`);
    }
    const node = svg("g", { class: `rx-node${site === chosen ? " rx-chosen" : ""}`, tabindex: 0, role: "button" });
    node.append(svg("rect", { x: middle - 43, y: 16, width: 86, height: 26, rx: 13 }));
    node.append(svg("text", { x: middle, y: 33.5, "text-anchor": "middle" }, name));
    node.addEventListener("click", () => choose(site));
    node.addEventListener("keydown", (event) => event.key === "Enter" && choose(site));
    group.append(node);
    figure.append(group);
  });
  return element("div", { class: "rx-scroll" }, figure);
}
