"use strict";
(() => {
  const source = document.getElementById("movie-data");
  if (!source) return;
  const FRAMES_PER_SECOND = 20, TRAIL = 8;
  const byId = (name) => document.getElementById(`movie-${name}`);
  const cloud = byId("particles"), energy = byId("energy"), kernel = byId("kernel");
  const slider = byId("frame"), play = byId("play"), where = byId("where"), speed = byId("speed"), choice = byId("run");

  // Numbers come as 16-bit integers in base 64, between `low` and `high`.
  function unpack(packed) {
    const bytes = Uint8Array.from(atob(packed.data), (letter) => letter.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    const span = (packed.high - packed.low) / 65535;
    return Float32Array.from({ length: bytes.length / 2 }, (_, i) => packed.low + view.getUint16(2 * i, true) * span);
  }
  const square = (values, size) => Array.from({ length: size }, (_, i) => Array.from(values.subarray(i * size, (i + 1) * size)));
  function open(run) {
    if (run.film) return run;
    run.film = unpack(run.positions);
    run.matrices = run.kernels.map((each) => square(unpack(each.values), each.size));
    return run;
  }

  // The figure repeats what the animation shows; it is there for print.
  const frames = document.querySelector(".frames");
  frames.open = false;
  addEventListener("beforeprint", () => { frames.open = true; });

  const runs = JSON.parse(source.textContent).runs;
  let run = open(runs[0]), now = 0, kernelShown = -1, timer = null, drawn = false;
  const at = (frame, axis) => {
    const first = (2 * frame + axis) * run.n_particles;
    return Array.from(run.film.subarray(first, first + run.n_particles));
  };

  function trail() {
    const x = [], y = [], stride = Math.max(1, Math.round(run.n_particles / 150));
    const first = Math.max(0, now - TRAIL);
    const frames = Array.from({ length: now - first + 1 }, (_, i) => [at(first + i, 0), at(first + i, 1)]);
    for (let k = 0; k < run.n_particles; k += stride) {
      frames.forEach(([xs, ys]) => { x.push(xs[k]); y.push(ys[k]); });
      x.push(null);
      y.push(null);
    }
    return { x, y };
  }
  const later = (step) => step + 1; // the axis is logarithmic
  const kernelNow = () => run.kernels.reduce((best, each, i) => (each.frame <= now ? i : best), 0);

  const config = { ...Charts.config, displayModeBar: false };
  const base = { margin: { l: 54, r: 12, t: 8, b: 46 }, showlegend: false, hovermode: "closest" };
  const axis = (text, more) => ({ title: { text, standoff: 8 }, zeroline: false, automargin: true, fixedrange: true, ...more });
  const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

  function drawCloud() {
    const learned = Charts.slot(1), muted = Theme.colour("--muted"), r = run.radius;
    const shapes = r ? [{ type: "circle", x0: -r, x1: r, y0: -r, y1: r, line: { color: muted, width: 1.2, dash: "dot" } }] : [];
    const dots = (x, y, marker) => ({ x, y, mode: "markers", hoverinfo: "skip", marker });
    Plotly.react(cloud, [
      dots(at(0, 0), at(0, 1), { size: 4, color: Charts.faded(Charts.slot(7), 0.4) }),
      { ...trail(), mode: "lines", hoverinfo: "skip", line: { width: 1, color: Charts.faded(learned, 0.4) } },
      { ...dots(at(now, 0), at(now, 1), { size: 7, color: learned, opacity: 0.9, line: { width: 0.6, color: Theme.colour("--surface") } }), hoverinfo: "x+y" },
      dots(run.marks.map((mark) => mark[0]), run.marks.map((mark) => mark[1]), { symbol: "cross-thin", size: 13, line: { width: 2.4, color: Theme.colour("--text") } }),
    ], {
      ...Charts.frame({
        ...base,
        xaxis: axis(plain(run.axes[0]), { range: run.x_range, constrain: "domain" }),
        yaxis: axis(plain(run.axes[1]), { range: run.y_range, scaleanchor: "x" }),
      }), shapes,
    }, config);
  }
  function drawEnergy() {
    Plotly.react(energy, [
      { x: run.steps.map(later), y: run.energy, text: run.steps, mode: "lines", line: { width: 2, color: Charts.slot(2) }, hovertemplate: "step %{text}: %{y:.4g}<extra></extra>" },
      { x: [later(run.steps[now])], y: [run.energy[now]], mode: "markers", hoverinfo: "skip", marker: { size: 11, color: Charts.slot(1) } },
    ], Charts.frame({ ...base, xaxis: axis("1 + Langevin step", { type: "log", dtick: 1, exponentformat: "power" }), yaxis: axis("H, mean per particle") }), config);
  }
  function drawKernel() {
    kernelShown = kernelNow();
    const z = run.matrices.length ? run.matrices[kernelShown] : [];
    const samples = "samples, by class probability", hidden = { showticklabels: false, ticks: "", showgrid: false };
    Plotly.react(kernel, [{
      type: "heatmap", z, zmin: run.kernel_low, zmax: run.kernel_high, colorscale: "Cividis", hovertemplate: "K = %{z:.3f}<extra></extra>",
      colorbar: { thickness: 10, outlinewidth: 0, tickfont: { color: Theme.colour("--muted") } },
    }], Charts.frame({
      ...base, margin: { ...base.margin, l: 34 },
      xaxis: axis(samples, { ...hidden, constrain: "domain" }),
      yaxis: axis(samples, { ...hidden, scaleanchor: "x", autorange: "reversed", constrain: "domain" }),
    }), config);
  }
  function drawAll() {
    drawCloud();
    drawEnergy();
    drawKernel();
    drawn = true;
  }

  function say() {
    const value = run.energy[now];
    const words = `step ${run.steps[now]}` + (value === null ? "" : `, energy ${Number(value).toPrecision(4)}`);
    where.textContent = words;
    slider.setAttribute("aria-valuetext", `frame ${now + 1} of ${run.n_frames}, ${words}`);
  }
  function show(frame) {
    now = Math.max(0, Math.min(run.n_frames - 1, frame));
    slider.value = String(now);
    say();
    if (!drawn) return;
    const tail = trail();
    Plotly.restyle(cloud, { x: [tail.x, at(now, 0)], y: [tail.y, at(now, 1)] }, [1, 2]);
    Plotly.restyle(energy, { x: [[later(run.steps[now])]], y: [[run.energy[now]]] }, [1]);
    if (kernelNow() !== kernelShown) drawKernel();
  }

  function stop() {
    cancelAnimationFrame(timer);
    timer = null;
    play.textContent = "Play";
  }
  function start() {
    if (now >= run.n_frames - 1) show(0);
    play.textContent = "Pause";
    let last = performance.now(), owed = 0;
    const tick = (time) => {
      owed += (time - last) / 1000 * FRAMES_PER_SECOND * Number(speed.value);
      last = time;
      if (owed >= 1) {
        show(now + Math.floor(owed));
        owed %= 1;
      }
      if (now >= run.n_frames - 1) stop();
      else timer = requestAnimationFrame(tick);
    };
    timer = requestAnimationFrame(tick);
  }
  const toggle = () => (timer === null ? start() : stop());
  const jump = (frame) => { stop(); show(frame); };

  play.addEventListener("click", toggle);
  slider.addEventListener("input", () => jump(Number(slider.value)));
  byId("back").addEventListener("click", () => jump(now - 1));
  byId("next").addEventListener("click", () => jump(now + 1));
  if (choice) {
    choice.addEventListener("change", () => {
      stop();
      run = open(runs[Number(choice.value)]);
      slider.max = String(run.n_frames - 1);
      now = 0;
      slider.value = "0";
      say();
      if (drawn) drawAll();
    });
  }
  document.getElementById("movie").addEventListener("keydown", (event) => {
    if (event.key === " " && !["BUTTON", "SELECT"].includes(event.target.tagName)) {
      event.preventDefault();
      toggle();
    }
  });
  new IntersectionObserver((entries, watcher) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    watcher.disconnect();
    drawAll();
  }, { rootMargin: "500px 0px" }).observe(cloud);
  Theme.onChange(() => { if (drawn) drawAll(); });
  say();
})();
