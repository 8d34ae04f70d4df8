// Heat maps as grids of cells. Colours are CSS: a cell has a class for its half of the scale and a share of the way.
const exact = (value) => (value === 0 ? "0" : value.toPrecision(5));

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name.startsWith("aria-")) made.setAttribute(name, String(value));
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

// From 0 to `top`, or both ways from 0 where routing may be negative.
class Scale {
  constructor(top, isDiverging = false) {
    Object.assign(this, { top, isDiverging });
  }

  // Class and share of a value's colour.
  colour(value) {
    const share = Math.min(1, Math.abs(value) / this.top);
    if (this.isDiverging) return [value < 0 ? "rx-neg" : "rx-pos", share, share > 0.6];
    return share <= 0.5 ? ["rx-low", 2 * share, share > 0.42] : ["rx-high", 2 * share - 1, true];
  }

  legend(name) {
    const bar = element("span", { class: this.isDiverging ? "rx-ramp rx-both" : "rx-ramp" });
    const low = this.isDiverging ? `\u2212${this.top}` : "0";
    return element("span", { class: "rx-legend" }, `${name} `, low, bar, `${this.isDiverging ? "+" : ""}${this.top}`);
  }
}

const inCell = (value) => (Math.abs(value) < 0.995 ? value.toFixed(2).replace(/^(-?)0/, "$1") : value.toFixed(1));

// rows x columns of values; `label(row, column, value)` is what a tooltip says of a cell.
function heatMap({ rows, columns, values, scale, label, title, numbers = false, className = "" }) {
  const map = element("div", { class: `rx-map ${className}`, role: "group", "aria-label": title });
  map.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
  let cells = "";
  for (let k = 0; k < rows * columns; k++) {
    const [name, share, isDeep] = scale.colour(values[k]);
    const ink = isDeep ? " rx-deep" : "";
    const text = numbers ? inCell(values[k]) : "";
    cells += `<i class="${name}${ink}" style="--t:${(100 * share).toFixed(1)}%" tabindex="${k ? -1 : 0}">${text}</i>`;
  }
  map.innerHTML = cells;
  map.rx = { columns, label: (k) => label(Math.floor(k / columns), k % columns, values[k]) };
  return map;
}

// One tooltip for all maps under `root`: pointer, tap and keyboard focus; arrow keys go from cell to cell.
function tooltips(root) {
  const tip = element("div", { class: "rx-tip", role: "tooltip", hidden: true });
  root.append(tip);
  let current = null;
  const cellOf = (event) => event.target.closest?.(".rx-map > i, [data-tip]");
  const show = (event) => {
    const cell = cellOf(event);
    if (!cell) return hide();
    if (cell === current && !tip.hidden) return undefined;
    current = cell;
    const map = cell.parentElement;
    const lines = cell.dataset.tip ?? map.rx.label([...map.children].indexOf(cell));
    const [head, ...rest] = lines.split("\n");
    tip.replaceChildren(element("b", {}, head), ...rest.map((line) => element("span", {}, line)));
    if (event.type === "focusin") cell.setAttribute("aria-label", lines.replaceAll("\n", ", "));
    tip.hidden = false;
    const box = cell.getBoundingClientRect();
    const own = tip.getBoundingClientRect();
    const left = Math.min(Math.max(6, box.left + box.width / 2 - own.width / 2), innerWidth - own.width - 6);
    const above = box.top - own.height - 8;
    tip.style.left = `${left}px`;
    tip.style.top = `${above > 4 ? above : box.bottom + 8}px`;
    return undefined;
  };
  const hide = () => {
    tip.hidden = true;
  };
  root.addEventListener("pointermove", show);
  root.addEventListener("pointerdown", show);
  root.addEventListener("focusin", show);
  root.addEventListener("pointerleave", hide);
  root.addEventListener("focusout", hide);
  addEventListener("scroll", hide, { passive: true, capture: true });
  root.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hide();
    const cell = event.target.closest?.(".rx-map > i");
    const map = cell?.parentElement;
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -map?.rx.columns, ArrowDown: map?.rx.columns }[event.key];
    const next = cell && move && map.children[[...map.children].indexOf(cell) + move];
    if (!next) return undefined;
    event.preventDefault();
    cell.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
    return undefined;
  });
}
