// Two views of the same routing: one token through all sites, and one site through all tokens.
const MOST_NUMBERS = 10;
const digits = (value) => (Math.abs(value) >= 1e-3 || value === 0 ? value.toFixed(3) : value.toExponential(0));

function drawDepth(state, sites, part, chooseSite) {
  const { reading, token, site } = state;
  part.depthTitle.textContent = tokenName(token);
  part.flow.replaceChildren(flowFigure(reading, sites, token, site, chooseSite));
  part.cards.style.setProperty("--n", reading.streams);
  part.cards.replaceChildren(...sites.map((name, k) => siteCard(state, name, k, chooseSite)));
}

// pre above the columns it reads from, post beside the rows it writes to.
function siteCard(state, name, site, chooseSite) {
  const { reading, token, scale } = state;
  const { streams: n } = reading;
  const numbers = n <= MOST_NUMBERS;
  const where = `${name}, ${tokenName(token)}`;
  const map = (of, rows, columns, about, className) => {
    const label = (m, k, value) => about(m, k, exact(value)).concat(`\n${where}`);
    const values = reading.values(site, of, token);
    const title = `${of} of ${where}`;
    return heatMap({ rows, columns, values, scale: scale[of], label, title, numbers, className });
  };
  const pre = map("pre", 1, n, (_, k, v) => `pre[${k}] = ${v}\nshare of stream ${k} that the branch reads`, "rx-pre");
  const res = map("res", n, n, (m, k, v) => `res[${m}, ${k}] = ${v}\nstream ${m} takes this much of stream ${k}`, "rx-res");
  const post = map("post", n, 1, (m, _, v) => `post[${m}] = ${v}\nwhat the branch writes to stream ${m}`, "rx-post");
  const about = (m, k, v) => `composite[${m}, ${k}] = ${v}\nstream ${m} after this site, of stream ${k} at the start`;
  const composite = map("composite", n, n, about, "rx-composite");
  const lines = (axis) => element("div", { class: `rx-${axis}` }, ...streamNumbers(n));
  const operation = element("div", { class: "rx-op" }, lines("columns"), lines("rows"), pre, res, post);
  operation.append(caption("pre", "rx-at-pre"), caption("res", "rx-at-res"), caption("post", "rx-at-post"));
  const whole = element("div", { class: "rx-op rx-alone" }, lines("columns"), lines("rows"), composite);
  whole.append(caption("composite", "rx-at-res"));
  const head = element("h4", {}, siteButton(name, site === state.site, () => chooseSite(site)));
  const pair = element("div", { class: "rx-pair" }, operation, whole);
  return element("article", { class: "rx-card" }, head, pair, facts(reading.numbers(site, token)));
}

const streamNumbers = (n) => Array.from({ length: n }, (_, k) => element("span", {}, String(k)));

const siteButton = (name, isChosen, choose) =>
  element("button", { type: "button", "aria-pressed": isChosen, onclick: choose }, name);

const caption = (text, name) => element("span", { class: `rx-caption ${name}` }, text);

function facts(numbers) {
  const line = (name, tip, ...values) =>
    element("div", { "data-tip": tip }, element("dt", {}, name), ...values.map((value) => element("dd", {}, value)));
  const { forward, backward, compositeForward, compositeBackward, rowError, columnError, similarity } = numbers;
  return element(
    "dl",
    { class: "rx-facts" },
    line(
      "gain of res",
      `gain ${exact(forward)} forward, ${exact(backward)} backward\nlargest absolute row sum and column sum of res`,
      `${digits(forward)} \u2192`,
      `\u2190 ${digits(backward)}`,
    ),
    line(
      "composite gain",
      `composite gain ${exact(compositeForward)} forward, ${exact(compositeBackward)} backward\n` +
        "of the product of all res up to this site",
      `${digits(compositeForward)} \u2192`,
      `\u2190 ${digits(compositeBackward)}`,
    ),
    line(
      "distance of sums from 1",
      `error ${exact(rowError)} of rows, ${exact(columnError)} of columns\ndoubly stochastic matrices have none`,
      `rows ${digits(rowError)}`,
      `columns ${digits(columnError)}`,
    ),
    line(
      "stream similarity",
      `similarity ${exact(similarity)}\nmean cosine between the streams that enter this site`,
      digits(similarity),
      "",
    ),
  );
}

function drawSite(state, sites, part, chooseSite, chooseToken) {
  const { reading, site, scale } = state;
  const { streams: n, count, pieces } = reading;
  const name = sites[site];
  part.siteTitle.textContent = name;
  part.sites.replaceChildren(...sites.map((each, k) => siteButton(each, k === site, () => chooseSite(k))));
  const along = (of) => {
    const values = new Float64Array(n * count);
    for (let t = 0; t < count; t++) reading.at(site, of, t).forEach((value, s) => (values[s * count + t] = value));
    const label = (s, t, value) => `${of}[${s}] = ${exact(value)}\n${name}, token ${t} ${quoted(pieces[t])}`;
    const map = heatMap({ rows: n, columns: count, values, scale: scale[of], label, title: `${of} of every token at ${name}` });
    map.style.minWidth = `${count * 12}px`;
    map.addEventListener("click", (event) => {
      const k = [...map.children].indexOf(event.target);
      if (k >= 0) chooseToken(k % count);
    });
    const rows = element("div", { class: "rx-rows" }, ...streamNumbers(n));
    return element("div", { class: "rx-along" }, element("h5", {}, of), rows, element("div", { class: "rx-scroll" }, map));
  };
  part.along.replaceChildren(along("pre"), along("post"));
  const small = pieces.map((piece, t) => {
    const label = (m, k, value) => `res[${m}, ${k}] = ${exact(value)}\n${name}, token ${t} ${quoted(piece)}`;
    const values = reading.at(site, "res", t);
    const map = heatMap({ rows: n, columns: n, values, scale: scale.res, label, title: `res of token ${t}` });
    // One stop for the keyboard is enough; the tokens above lead to every matrix.
    map.firstElementChild.tabIndex = -1;
    const className = t === state.token ? "rx-small rx-chosen" : "rx-small";
    const box = element("figure", { class: className, onclick: () => chooseToken(t) });
    box.append(map, element("figcaption", {}, shownPiece(piece)));
    return box;
  });
  part.strip.style.setProperty("--n", n);
  part.strip.replaceChildren(...small);
}
