"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("charts-data").textContent);
  const coarse = matchMedia("(pointer: coarse)").matches;
  const config = {
    responsive: true, displaylogo: false, displayModeBar: coarse ? false : "hover",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "toImage"],
  };
  const faded = (hex, opacity) => {
    const value = parseInt(hex.slice(1), 16);
    return `rgba(${value >> 16},${(value >> 8) & 255},${value & 255},${opacity})`;
  };
  const slot = (number) => Theme.colour(`--slot-${number}`);

  function paint(trace) {
    const painted = { ...trace };
    const part = trace.meta && trace.meta.part;
    const colour = trace.meta ? slot(trace.meta.slot) : null;
    if (part === "band") painted.fillcolor = faded(colour, 0.18);
    if (part === "line") {
      painted.line = { ...trace.line, color: colour };
      painted.marker = { ...trace.marker, color: colour };
      if (trace.error_x) painted.error_x = { ...trace.error_x, color: colour, thickness: 1.4, width: 3 };
      if (trace.error_y) painted.error_y = { ...trace.error_y, color: colour, thickness: 1.4, width: 3 };
    }
    if (part === "bars") painted.marker = { ...trace.marker, color: colour };
    if (part === "field") {
      const text = Theme.colour("--muted");
      painted.colorbar = { ...trace.colorbar, tickfont: { color: text }, title: { ...trace.colorbar.title, font: { color: text } } };
    }
    return painted;
  }

  function frame(layout, width = 1000) {
    const sparse = width < 480 && layout.xaxis.dtick === 1 ? { dtick: 2 } : {};
    const text = Theme.colour("--text");
    const axis = (given) => ({
      ...given, color: Theme.colour("--muted"), gridcolor: Theme.colour("--grid"), linecolor: Theme.colour("--line"), zerolinecolor: Theme.colour("--muted"),
      tickcolor: Theme.colour("--line"), title: { ...given.title, font: { color: text, size: 13 } },
    });
    return {
      ...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
      dragmode: coarse ? false : "zoom",
      font: { family: "system-ui, -apple-system, 'Segoe UI', sans-serif", size: 12, color: text },
      xaxis: { ...axis(layout.xaxis), ...sparse }, yaxis: axis(layout.yaxis),
      hoverlabel: { bgcolor: Theme.colour("--surface"), bordercolor: Theme.colour("--line"), font: { color: text } },
    };
  }

  const hiddenIn = (element) => {
    const scope = element.closest(".scope");
    if (!scope) return new Set();
    const off = scope.querySelectorAll('.legend button[aria-pressed="false"]');
    return new Set([...off].map((button) => button.dataset.method));
  };

  function draw(element) {
    const figure = figures[element.closest("[data-chart]").dataset.chart];
    if (!figure) return;
    const hidden = hiddenIn(element);
    const data = figure.data.map(paint).map((trace) => ({ ...trace, visible: !hidden.has(trace.meta.method) }));
    Plotly.react(element, data, frame(figure.layout, element.clientWidth), config);
    element.dataset.drawn = "true";
  }

  const plots = [...document.querySelectorAll("[data-chart] > .plot")];
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting || entry.target.dataset.drawn) continue;
      near.unobserve(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "500px 0px" });
  plots.forEach((plot) => near.observe(plot));
  const redraw = (within) => plots.filter((plot) => plot.dataset.drawn && within.contains(plot)).forEach(draw);
  Theme.onChange(() => redraw(document));
  // A phone that is turned, or a narrowed window, takes other ticks.
  matchMedia("(max-width: 40rem)").addEventListener("change", () => redraw(document));

  for (const legend of document.querySelectorAll(".legend")) {
    const methods = [...legend.querySelectorAll("[data-method]")];
    legend.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      if (button.dataset.all) {
        methods.forEach((each) => each.setAttribute("aria-pressed", String(button.dataset.all === "show")));
      } else {
        button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
      }
      redraw(legend.closest(".scope"));
    });
  }

  for (const figure of document.querySelectorAll("[data-chart]")) {
    const link = figure.querySelector("[data-svg]");
    if (link) link.href = figure.querySelector("img.still").src;
    const buttons = [...figure.querySelectorAll(".switch button")];
    for (const button of buttons) {
      button.addEventListener("click", () => {
        buttons.forEach((each) => each.setAttribute("aria-pressed", String(each === button)));
        figure.classList.toggle("show-still", button.dataset.view === "still");
        const plot = figure.querySelector(".plot");
        if (button.dataset.view === "live" && plot.dataset.drawn) Plotly.Plots.resize(plot);
      });
    }
  }
})();
