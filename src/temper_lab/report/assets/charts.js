// Draws every .plot when its tab is first seen, follows the theme, and hides methods that were clicked away.
(() => {
  "use strict";
  const hidden = new Set();
  const drawn = new Set();

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function themed() {
    const [fg, muted, line, card] = ["--fg", "--muted", "--line", "--card"].map(color);
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      "font.color": fg,
      "font.family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
      "hoverlabel.bgcolor": card,
      "hoverlabel.bordercolor": muted,
      "hoverlabel.font.color": fg,
      "hoverlabel.align": "left",
    };
    for (const axis of ["xaxis", "yaxis"]) {
      layout[`${axis}.gridcolor`] = line;
      layout[`${axis}.linecolor`] = muted;
      layout[`${axis}.tickcolor`] = muted;
    }
    return layout;
  }

  async function draw(plot) {
    const { data, layout } = JSON.parse(plot.querySelector("script").textContent);
    drawn.add(plot);
    plot.textContent = "";
    const isTouch = matchMedia("(pointer: coarse)").matches;
    // On a phone a finger scrolls the page; it must not zoom a chart.
    layout.dragmode = isTouch ? false : "zoom";
    layout.font = { size: plot.clientWidth < 480 ? 10 : 12 };
    for (const trace of data) trace.visible = !hidden.has(trace.meta);
    await Plotly.newPlot(plot, data, layout, {
      responsive: true,
      // Its buttons hide titles on a phone, and one of them would leave the page; a double click resets a zoom.
      displayModeBar: false,
    });
    await Plotly.relayout(plot, themed());
    plot.dataset.drawn = "yes";
  }

  function drawVisible() {
    for (const plot of document.querySelectorAll(".plot")) {
      if (!drawn.has(plot) && plot.offsetParent !== null) draw(plot);
    }
  }

  function showMethods() {
    for (const button of document.querySelectorAll(".legend button[data-method]")) {
      button.setAttribute("aria-pressed", String(!hidden.has(button.dataset.method)));
    }
    for (const plot of drawn) {
      if (plot.data) Plotly.restyle(plot, { visible: plot.data.map((trace) => !hidden.has(trace.meta)) });
    }
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest(".legend button");
    if (!button) return;
    const method = button.dataset.method;
    if (method === undefined) hidden.clear();
    else if (!hidden.delete(method)) hidden.add(method);
    showMethods();
  });
  document.addEventListener("temper:theme", () => {
    for (const plot of drawn) if (plot.data) Plotly.relayout(plot, themed());
  });
  document.addEventListener("temper:tab", drawVisible);
})();
