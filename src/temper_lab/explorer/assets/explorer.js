// The page: choose a model and a text, then a token and a site.
const data = JSON.parse(document.getElementById("explorer-data").textContent);
const root = document.querySelector(".rx");
const part = Object.fromEntries([...root.querySelectorAll("[data-part]")].map((node) => [node.dataset.part, node]));
const runner = new Runner(data);
const state = { model: 0, token: 12, site: 0, reading: null };
// Bits from which an underline is as strong as it gets.
const MANY_BITS = 12;
const PAUSE = 250;

const model = () => data.models[state.model];
const shownPiece = (piece) => piece.replace(/ /g, "\u00b7").replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5");
const quoted = (piece) => `\u201c${shownPiece(piece)}\u201d`;
const tokenName = (token) => (token === ALL ? "all tokens (mean)" : `token ${token} ${quoted(state.reading.pieces[token])}`);

function start() {
  data.models.forEach((each, k) => part.model.append(element("option", { value: k }, each.title)));
  data.texts.forEach((each, k) => part.text.append(element("option", { value: k }, each.title)));
  part.text.append(element("option", { value: "own" }, "your own text"));
  part.model.addEventListener("change", () => chooseModel(Number(part.model.value)));
  part.text.addEventListener("change", () => chooseText(part.text.value));
  let timer = 0;
  part.own.addEventListener("input", () => {
    clearTimeout(timer);
    part.text.value = "own";
    timer = setTimeout(read, PAUSE);
  });
  part.tokens.addEventListener("keydown", moveToken);
  part.all.addEventListener("click", () => chooseToken(ALL));
  tooltips(root);
  part.own.value = data.texts[0].text;
  chooseModel(0);
}

function chooseModel(index) {
  state.model = index;
  const { live, why, command, facts } = model();
  part.facts.textContent = facts;
  part.own.readOnly = !live;
  part.hint.textContent = live ? "Type to change it: the model reads it here, in this page" : "The text";
  part.why.hidden = Boolean(live);
  if (!live) {
    const said = `Only the texts above can be shown for this model: ${why}. For a text of your own: `;
    part.why.replaceChildren(said, element("code", {}, command));
    if (part.text.value === "own") return chooseText("0");
  }
  return read();
}

function chooseText(value) {
  part.text.value = value;
  if (value !== "own") part.own.value = data.texts[Number(value)].text;
  if (value === "own") part.own.focus();
  read();
}

// Shows the text in the box: as PyTorch read it where it did, else as the worker does.
function read() {
  const index = data.texts.findIndex(({ text }) => text === part.own.value);
  runner.forget();
  if (index >= 0) {
    part.text.value = String(index);
    const { packed, ...trace } = model().traces[index];
    say(trace.isCut ? `The text is longer than this model's context: its first ${trace.pieces.length} tokens are shown.` : "");
    return show({ ...trace, packed: new Float32Array(bytesOf(packed)) });
  }
  const began = performance.now();
  part.text.value = "own";
  say("reading \u2026");
  return runner.run(state.model, part.own.value, {
    progress: (share) => say(`reading \u2026 ${Math.round(100 * share)}%`),
    failed: (error) => say(`This browser could not run the model (${error.message ?? error}). ${model().command} does it.`),
    done: (message) => {
      const time = ((performance.now() - began) / 1000).toFixed(2);
      const cut = message.isCut ? ` The text is longer than this model's context: only its beginning is read.` : "";
      say(`Computed in this page: ${message.pieces.length} tokens in ${time} s.${cut}`);
      show(message);
    },
  });
}

const say = (text) => {
  part.status.textContent = text;
};

function show(trace) {
  const { streams, sites, range } = model();
  state.reading = new Reading(trace, streams, sites.length);
  state.token = Math.min(state.token, trace.pieces.length - 1);
  state.site = Math.min(state.site, sites.length - 1);
  const isDiverging = range === "any";
  state.scale = isDiverging ? unboundedScales(state.reading) : BOUNDED;
  const named = isDiverging ? { res: "pre, res, post", composite: "composite" } : { res: "pre, res, composite", post: "post" };
  part.legend.replaceChildren(...Object.entries(named).map(([of, name]) => state.scale[of].legend(name)));
  part.routing.hidden = streams === 1;
  part.plain.hidden = streams > 1;
  drawTokens();
  if (streams > 1) drawMaps();
  root.dataset.ready = `${state.model}:${part.own.value}`;
}

const BOUNDED = { pre: new Scale(1), res: new Scale(1), composite: new Scale(1), post: new Scale(2) };

// Where routing is not bounded: one scale for all of it, and one for products, which grow with depth.
function unboundedScales({ packed, composites }) {
  const most = (values, least) => values.reduce((high, value) => Math.max(high, Math.abs(value)), least);
  const nice = [1, 1.5, 2, 3, 5, 10, 20, 50, 100];
  const scale = (top) => new Scale(nice.find((each) => each >= top) ?? top.toPrecision(1) * 2, true);
  const res = scale(most(packed, 1));
  return { pre: res, res, post: res, composite: scale(composites.flat().reduce((high, each) => most(each, high), 1)) };
}

function drawTokens() {
  const { pieces, surprise } = state.reading;
  const chips = pieces.map((piece, t) => {
    const bits = surprise[t];
    const tip = bits === null ? "the beginning of the text" : `${bits.toFixed(2)} bits of surprise, given the tokens before it`;
    const said = `token ${t} ${quoted(piece)}\n${tip}`;
    const chip = element("button", { type: "button", class: "rx-chip", "data-tip": said, tabindex: -1 });
    chip.textContent = shownPiece(piece);
    chip.style.setProperty("--t", `${(100 * Math.min(1, (bits ?? 0) / MANY_BITS)).toFixed(0)}%`);
    chip.addEventListener("click", () => chooseToken(t));
    return chip;
  });
  part.tokens.replaceChildren(...chips);
  const known = surprise.filter((bits) => bits !== null);
  const mean = known.reduce((sum, bits) => sum + bits, 0) / known.length;
  part.mean.textContent = known.length ? `${mean.toFixed(2)} bits a token on average` : "";
  markToken();
}

function markToken() {
  [...part.tokens.children].forEach((chip, t) => {
    chip.setAttribute("aria-pressed", t === state.token);
    chip.tabIndex = t === Math.max(0, state.token) ? 0 : -1;
  });
  part.all.setAttribute("aria-pressed", state.token === ALL);
}

function moveToken(event) {
  const last = state.reading.count - 1;
  const now = Math.max(0, state.token);
  const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  chooseToken(Math.min(last, Math.max(0, next)));
  part.tokens.children[state.token].focus();
}

function chooseToken(token) {
  state.token = token;
  markToken();
  if (state.reading.streams > 1) drawMaps();
}

function chooseSite(site) {
  state.site = site;
  drawMaps();
}

function drawMaps() {
  drawDepth(state, model().sites, part, chooseSite);
  drawSite(state, model().sites, part, chooseSite, chooseToken);
}

// For the console: what is shown, in full precision.
root.explorer = { data, state, runner };
start();
