// Tabs by click, key and address; light and dark; tables sorted by their headings.
(() => {
  "use strict";
  const root = document.documentElement;
  const tabs = [...document.querySelectorAll('[role="tab"]')];
  const panels = [...document.querySelectorAll('[role="tabpanel"]')];

  function show(id, { focus = false } = {}) {
    for (const tab of tabs) {
      const isShown = tab.dataset.tab === id;
      tab.setAttribute("aria-selected", String(isShown));
      tab.tabIndex = isShown ? 0 : -1;
      if (isShown) {
        if (focus) tab.focus();
        // Of its list alone: `scrollIntoView` also scrolls a page that this one is embedded in.
        const list = tab.parentElement.getBoundingClientRect();
        const box = tab.getBoundingClientRect();
        const before = Math.floor(Math.min(0, box.left - list.left));
        tab.parentElement.scrollLeft += before + Math.ceil(Math.max(0, box.right - list.right));
      }
    }
    for (const panel of panels) panel.hidden = panel.id !== id;
    document.dispatchEvent(new CustomEvent("temper:tab", { detail: id }));
  }

  // What follows a slash belongs to the tab itself.
  function fromAddress() {
    const id = decodeURIComponent(location.hash.slice(1)).split("/")[0];
    return panels.some((panel) => panel.id === id) ? id : tabs[0].dataset.tab;
  }

  function go(id, options) {
    // Replaced, not set: setting it would scroll the page to the panel.
    history.replaceState(null, "", `#${id}`);
    show(id, options);
  }

  for (const tab of tabs) tab.addEventListener("click", () => go(tab.dataset.tab));
  document.querySelector('[role="tablist"]').addEventListener("keydown", (event) => {
    const here = tabs.indexOf(document.activeElement);
    const last = tabs.length - 1;
    const next = { ArrowRight: here === last ? 0 : here + 1, ArrowLeft: here <= 0 ? last : here - 1, Home: 0, End: last }[event.key];
    if (here < 0 || next === undefined) return;
    event.preventDefault();
    go(tabs[next].dataset.tab, { focus: true });
  });
  addEventListener("hashchange", () => show(fromAddress()));

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const changed = () => document.dispatchEvent(new CustomEvent("temper:theme"));
  document.getElementById("theme").addEventListener("click", () => {
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
    root.dataset.theme = isDark ? "light" : "dark";
    try {
      localStorage.setItem("temper-theme", root.dataset.theme);
    } catch {
      // Some browsers keep nothing for files; then the choice lasts as long as the page.
    }
    changed();
  });
  dark.addEventListener("change", changed);

  function sort(table, column, isDown) {
    const body = table.tBodies[0];
    // The lines between groups mean nothing in another order.
    for (const row of body.rows) row.classList.remove("first");
    const value = (row) => row.cells[column].dataset.sort;
    const compare = (a, b) => {
      // What is missing stays at the end, whichever way.
      if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
      const order = isNaN(a) || isNaN(b) ? a.localeCompare(b) : Number(a) - Number(b);
      return isDown ? -order : order;
    };
    body.append(...[...body.rows].sort((one, other) => compare(value(one), value(other))));
  }
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      head.querySelector("button")?.addEventListener("click", () => {
        const isDown = head.getAttribute("aria-sort") === "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
        sort(table, column, isDown);
      });
    });
  }

  show(fromAddress());
})();
