"use strict";
// Draws the charts of a report from the JSON document in the page. It makes elements and sets their
// text, never markup, so no name in the document can become part of the page.
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const redraws = [];
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const make = (tag, attributes, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name === "class") element.className = value;
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  };
  const figures = (value) => Number(value.toPrecision(4)).toString();
  const time = (seconds) => {
    const size = Math.abs(seconds);
    if (size >= 1 || size === 0) return figures(seconds) + " s";
    if (size >= 1e-3) return figures(seconds * 1e3) + " ms";
    if (size >= 1e-6) return figures(seconds * 1e6) + " µs";
    return figures(seconds * 1e9) + " ns";
  };
  const bytes = (count) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (count >= 1024 && unit < 4) { count /= 1024; unit += 1; }
    return figures(count) + " " + units[unit];
  };
  const color = {
    "forward": "--forward", "backward": "--backward", "recompute": "--recompute", "update": "--update", "communication": "--communication",
    "load": "--load", "exposed communication": "--exposed", "bubble": "--bubble", "host": "--host",
  };
  const palette = ["--forward", "--exposed", "--update", "--bubble-line", "--backward", "--recompute", "--communication", "--load"];
  const isNarrow = () => document.documentElement.clientWidth < 640;
  const axis = (more) => ({
    stroke: () => css("--faint"), font: "13px system-ui, sans-serif", labelFont: "13px system-ui, sans-serif", labelSize: 22,
    grid: { stroke: () => css("--line"), width: 1 }, ticks: { stroke: () => css("--line"), width: 1 }, ...more,
  });
  const powers = Array.from({ length: 51 }, (_, exponent) => 2 ** exponent);
  const times = axis({ values: (_, ticks) => ticks.map(time), space: 80 });

  // Charts of one step share what part of it they show.
  const linked = [];
  let isLinking = false;
  const showEverywhere = (source, min, max) => {
    if (isLinking) return;
    isLinking = true;
    for (const other of linked) if (other !== source) other.setScale("x", { min, max });
    isLinking = false;
  };
  // What all charts over time can: wheel, buttons and keys. `move` gives the keys that only one has.
  const zoomable = (plot, holder, bar, whole, move) => {
    const show = (min, max) => {
      const width = Math.min(Math.max(max - min, whole * 1e-6), whole);
      const from = Math.min(Math.max(min, 0), whole - width);
      plot.setScale("x", { min: from, max: from + width });
    };
    const zoom = (factor, around) => {
      const { min, max } = plot.scales.x;
      const at = around === undefined ? (min + max) / 2 : around;
      show(at - (at - min) * factor, at + (max - at) * factor);
    };
    const pan = (share) => { const { min, max } = plot.scales.x; show(min + (max - min) * share, max + (max - min) * share); };
    plot.over.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey) return;
      event.preventDefault();
      zoom(event.deltaY < 0 ? 0.75 : 1 / 0.75, plot.posToVal(event.offsetX, "x"));
    }, { passive: false });
    const keys = { "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), "0": () => show(0, whole), "Home": () => show(0, whole),
      "ArrowLeft": () => pan(-0.2), "ArrowRight": () => pan(0.2), ...move };
    holder.addEventListener("keydown", (event) => {
      const act = keys[event.key];
      if (!act || event.target !== holder || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act();
    });
    bar.append(
      make("button", { type: "button", "aria-label": "zoom in", onclick: () => zoom(0.5) }, "+"),
      make("button", { type: "button", "aria-label": "zoom out", onclick: () => zoom(2) }, "−"),
      make("button", { type: "button", onclick: () => show(0, whole) }, "whole step"));
    linked.push(plot);
    return { show };
  };
  const fit = (plot, holder, height) => {
    const resize = () => plot.setSize({ width: Math.max(holder.clientWidth, 200), height: typeof height === "function" ? height() : height });
    new ResizeObserver(() => requestAnimationFrame(resize)).observe(holder);
    redraws.push(() => plot.redraw(false, true));
  };
  const scaleHook = (plot, key) => { if (key === "x") showEverywhere(plot, plot.scales.x.min, plot.scales.x.max); };

  function timeline(chart, root) {
    const rows = chart.rows.map((row) => {
      const count = row.spans.length / 5;
      const [start, end, kind, name, micro] = [0, 1, 2, 3, 4].map(() => new Array(count));
      let before = 0;
      for (let index = 0; index < count; index += 1) {
        const [gap, length, what, called, batch] = row.spans.slice(index * 5, index * 5 + 5);
        start[index] = (before + gap) * 1e-9;
        end[index] = (before + gap + length) * 1e-9;
        before += gap + length;
        [kind[index], name[index], micro[index]] = [what, called, batch];
      }
      return { ...row, start, end, kind, name, micro };
    });
    const whole = Math.max(...chart.steps.map((step) => step[1]), 1e-12);
    let shown = [], tops = [], height = 0, selected = null, withStreams = false;
    const both = chart.steps.length > 1;
    const arrange = () => {
      shown = rows.filter((row) => withStreams || row.stream === null);
      tops = [];
      height = 0;
      shown.forEach((row, index) => {
        const before = shown[index - 1];
        if (!before || before.rank !== row.rank) height += 20;
        tops.push(height);
        height += row.stream === null ? 24 : 17;
      });
      height += 8;
    };
    arrange();
    const bar = make("div", { class: "bar" });
    const holder = make("div", { class: "plot tall", tabindex: "0", role: "group", "aria-label":
      "Timeline. Plus and minus zoom, left and right pan, up and down choose a row, comma and full stop an instruction, 0 shows the whole step." });
    const says = make("div", { class: "says", "aria-live": "polite" });
    const tip = make("div", { class: "tip" });
    const used = new Set(rows.flatMap((row) => row.kind));
    const key = make("div", { class: "bar" });
    chart.kinds.forEach((kind, index) => {
      if (!used.has(index)) return;
      const swatch = make("i", kind === "bubble" ? { class: "striped" } : {});
      swatch.style.background = `var(${color[kind]})`;
      key.append(make("span", { class: "key" }, swatch, kind));
    });
    root.append(key, bar, holder, says);
    const describe = (row, index) => {
      const batch = row.micro[index] ? `, micro-batch ${row.micro[index] - 1}` : "";
      return `${chart.kinds[row.kind[index]]}: ${chart.names[row.name[index]]}${batch}\n${time(row.end[index] - row.start[index])} from ${time(row.start[index])}` +
        ` (${figures((row.end[index] - row.start[index]) / whole * 100)} % of the step)\nrank ${row.rank}, ${row.stream === null ? "the step" : row.stream}, ${row.origin}`;
    };
    // The last span of a row that starts at or before a time.
    const spanAt = (row, at) => {
      let [low, high] = [0, row.start.length];
      while (low < high) { const middle = (low + high) >> 1; if (row.start[middle] <= at) low = middle + 1; else high = middle; }
      return low - 1;
    };
    const draw = (plot) => {
      const { ctx, bbox } = plot;
      const ratio = devicePixelRatio;
      const x = (seconds) => plot.valToPos(seconds, "x", true);
      const { min, max } = plot.scales.x;
      const fills = chart.kinds.map((kind) => css(color[kind]));
      const [ink, faint, edge, paper] = ["--ink", "--faint", "--bubble-line", "--paper"].map(css);
      ctx.save();
      ctx.textBaseline = "middle";
      shown.forEach((row, index) => {
        const top = bbox.top + tops[index] * ratio;
        const size = (row.stream === null ? 20 : 13) * ratio;
        const first = !shown[index - 1] || shown[index - 1].rank !== row.rank;
        if (first) {
          ctx.fillStyle = ink;
          ctx.font = `600 ${13 * ratio}px system-ui, sans-serif`;
          ctx.textAlign = "left";
          ctx.fillText(`rank ${row.rank}` + (row.stage || rows.some((one) => one.stage) ? `, stage ${row.stage}` : ""), 6 * ratio, top - 9 * ratio);
        }
        ctx.fillStyle = row.stream === null ? ink : faint;
        ctx.font = `${12.5 * ratio}px system-ui, sans-serif`;
        ctx.textAlign = "right";
        const origin = both && isNarrow() ? row.origin.slice(0, 4) : row.origin;
        const label = row.stream === null ? origin : (both ? row.origin.slice(0, 1) + " " : "") + row.stream;
        ctx.save();
        ctx.beginPath();
        ctx.rect(2 * ratio, top - 2 * ratio, bbox.left - 6 * ratio, size + 4 * ratio);
        ctx.clip();
        ctx.fillText(label, bbox.left - 6 * ratio, top + size / 2);
        ctx.restore();
        ctx.save();
        ctx.beginPath();
        ctx.rect(bbox.left, top, bbox.width, size + 2);
        ctx.clip();
        // Of spans within one pixel the first is drawn.
        let drawn = -1;
        for (let at = Math.max(spanAt(row, min), 0); at < row.start.length && row.start[at] <= max; at += 1) {
          if (row.end[at] < min) continue;
          const from = x(row.start[at]);
          const to = Math.max(x(row.end[at]), from + 1);
          if (to <= drawn) continue;
          const width = to - from > 3 * ratio ? to - from - 1 : to - from;
          ctx.fillStyle = fills[row.kind[at]];
          ctx.fillRect(from, top, width, size);
          // Dashes, so that bubbles show without their colour.
          if (chart.kinds[row.kind[at]] === "bubble" && width > 4 * ratio) {
            ctx.strokeStyle = edge;
            ctx.setLineDash([3 * ratio, 3 * ratio]);
            ctx.strokeRect(from + 1, top + 1, width - 2, size - 2);
            ctx.setLineDash([]);
          }
          if (row.micro[at] && row.kind[at] < 3 && width > 18 * ratio && size > 12 * ratio) {
            ctx.fillStyle = paper;
            ctx.textAlign = "center";
            ctx.font = `${12 * ratio}px system-ui, sans-serif`;
            ctx.fillText(String(row.micro[at] - 1), from + width / 2, top + size / 2);
          }
          if (selected && selected.row === row && selected.index === at) {
            ctx.strokeStyle = ink;
            ctx.lineWidth = 2 * ratio;
            ctx.strokeRect(from + 1, top + 1, Math.max(width - 2, 2), size - 2);
            ctx.lineWidth = 1;
          }
          drawn = to;
        }
        ctx.restore();
      });
      ctx.restore();
    };
    const hover = (plot) => {
      const { left, top } = plot.cursor;
      tip.style.display = "none";
      if (left < 0 || top < 0) return;
      const place = tops.findIndex((start, index) => top >= start && top < start + (shown[index].stream === null ? 22 : 15));
      if (place < 0) return;
      const row = shown[place];
      const at = plot.posToVal(left, "x");
      const index = spanAt(row, at);
      if (index < 0 || at > row.end[index] + (plot.scales.x.max - plot.scales.x.min) / plot.over.clientWidth) return;
      tip.textContent = describe(row, index);
      tip.style.display = "block";
      const room = plot.over.clientWidth - tip.offsetWidth - 4;
      tip.style.left = `${Math.max(Math.min(left + 14, room), 0)}px`;
      tip.style.top = `${top + 20 + tip.offsetHeight > plot.over.clientHeight ? Math.max(top - tip.offsetHeight - 10, 0) : top + 20}px`;
    };
    const plotHeight = () => height + 58;
    const plot = new uPlot({
      width: 800, height: plotHeight(), legend: { show: false }, padding: [0, 12, 0, 0],
      scales: { x: { time: false }, y: { range: () => [0, 1] } },
      axes: [{ ...times, side: 2 }, { size: () => (isNarrow() ? 74 : 148), values: () => [], grid: { show: false }, ticks: { show: false } }],
      series: [{}, { show: true, paths: () => null, points: { show: false } }],
      cursor: { y: false, drag: { x: true, y: false }, points: { show: false } },
      hooks: { draw: [draw], setCursor: [hover], setScale: [scaleHook], ready: [(one) => one.over.append(tip)] },
    }, [[0, whole], [0, 1]], holder);
    const choose = (row, index) => {
      if (!row || index < 0 || index >= row.start.length) return;
      selected = { row, index };
      says.textContent = describe(row, index).replaceAll("\n", "; ");
      const { min, max } = plot.scales.x;
      if (row.start[index] > max || row.end[index] < min) {
        const width = max - min;
        control.show(row.start[index] - width / 2, row.start[index] + width / 2);
      }
      plot.redraw(false, true);
    };
    const chooseRow = (step) => {
      const now = selected ? shown.indexOf(selected.row) : -1;
      const next = shown[Math.min(Math.max(now + step, 0), shown.length - 1)];
      choose(next, Math.max(spanAt(next, selected ? selected.row.start[selected.index] : plot.scales.x.min), 0));
    };
    const control = zoomable(plot, holder, bar, whole, {
      "ArrowDown": () => chooseRow(1), "ArrowUp": () => chooseRow(-1),
      ".": () => choose(selected ? selected.row : shown[0], selected ? selected.index + 1 : 0),
      ",": () => choose(selected ? selected.row : shown[0], selected ? selected.index - 1 : 0),
    });
    plot.over.addEventListener("click", () => {
      const { left, top } = plot.cursor;
      const place = tops.findIndex((start, index) => top >= start && top < start + (shown[index].stream === null ? 22 : 15));
      if (place >= 0) choose(shown[place], spanAt(shown[place], plot.posToVal(left, "x")));
    });
    if (rows.some((row) => row.stream !== null)) {
      const box = make("input", { type: "checkbox" });
      box.addEventListener("change", () => {
        withStreams = box.checked;
        arrange();
        plot.setSize({ width: Math.max(holder.clientWidth, 200), height: plotHeight() });
      });
      bar.append(make("label", {}, box, "every stream"));
    }
    bar.append(make("span", { class: "key" }, "drag to zoom, double-click for the whole; Ctrl and wheel; keys + − 0 ← → ↑ ↓ , ."));
    if (chart.note) root.append(make("p", { class: "says" }, chart.note));
    fit(plot, holder, plotHeight);
  }

  function lines(root, data, series, axes, more) {
    const holder = make("div", { class: "plot", tabindex: "0", role: "group", "aria-label": more.label });
    root.append(holder);
    const plot = new uPlot({
      width: 800, height: more.height || 300, padding: [12, 14, 0, 0],
      scales: { x: { time: false, ...more.x }, y: { range: more.range } }, axes, series: [more.first, ...series],
      cursor: { drag: { x: true, y: false } }, hooks: more.hooks || {},
    }, data, holder);
    fit(plot, holder, () => (more.height || 300) - (plot.root.querySelector(".u-legend")?.offsetHeight || 0) + 30);
    return { plot, holder };
  }
  const stroke = (index) => () => css(palette[index % palette.length]);

  function memory(chart, root) {
    if (!chart.curves.length) { root.append("There is no memory to show."); return; }
    const whole = Math.max(chart.step_seconds, 1e-12);
    const tables = chart.curves.map((curve) => [
      [...curve.times, Math.max(whole, curve.times[curve.times.length - 1])], [...curve.bytes, curve.bytes[curve.bytes.length - 1]]]);
    const data = uPlot.join(tables);
    const bar = make("div", { class: "bar" });
    root.append(bar);
    const most = Math.max(...chart.curves.map((curve) => Math.max(curve.peak_bytes, curve.arena)));
    // A limit far above every curve would flatten them.
    const hasLimit = chart.limit && chart.limit < most * 4;
    const top = Math.max(most, hasLimit ? chart.limit : 0) * 1.06;
    const level = (plot, value, text, stroke, isLeft) => {
      const { ctx, bbox } = plot;
      const y = plot.valToPos(value, "y", true);
      ctx.save();
      ctx.strokeStyle = stroke; ctx.fillStyle = stroke;
      ctx.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
      ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke();
      ctx.font = `${12.5 * devicePixelRatio}px system-ui, sans-serif`;
      ctx.textAlign = isLeft ? "left" : "right";
      const [x, below] = [isLeft ? bbox.left + 6 * devicePixelRatio : bbox.left + bbox.width - 6 * devicePixelRatio, value > top * 0.9];
      const base = y + (below ? 16 : -6) * devicePixelRatio;
      // Curves that pass behind the text would strike it out.
      const width = ctx.measureText(text).width;
      ctx.fillStyle = css("--paper");
      ctx.fillRect((isLeft ? x : x - width) - 2 * devicePixelRatio, base - 11 * devicePixelRatio, width + 4 * devicePixelRatio, 14 * devicePixelRatio);
      ctx.fillStyle = stroke;
      ctx.fillText(text, x, base);
      ctx.restore();
    };
    const series = chart.curves.map((curve, index) => ({
      label: `rank ${curve.rank}, stage ${curve.stage}`, stroke: stroke(index), width: 2, spanGaps: true, points: { show: false },
      paths: uPlot.paths.stepped({ align: 1 }), value: (plot, value, number, at) => {
        for (let before = at; before >= 0; before -= 1) if (data[number][before] != null) return bytes(data[number][before]);
        return "–";
      },
    }));
    const { plot, holder } = lines(root, data, series, [times, axis({ values: (_, ticks) => ticks.map(bytes), size: isNarrow() ? 74 : 90, incrs: powers })], {
      label: "Memory over the step. Plus and minus zoom, left and right pan, 0 shows the whole step.", height: 320,
      first: { label: "time", value: (_, value) => (value == null ? "–" : time(value)) }, range: () => [0, top],
      hooks: { setScale: [scaleHook], draw: [(one) => {
        if (hasLimit) level(one, chart.limit, `device: ${bytes(chart.limit)}`, css("--bad"), true);
        const arena = Math.max(...chart.curves.map((curve) => curve.arena));
        level(one, arena, `allocated: ${bytes(arena)}`, css("--faint"), false);
      }] },
    });
    zoomable(plot, holder, bar, whole, {});
    const choice = make("select", { "aria-label": "rank whose peak is explained" });
    chart.curves.forEach((curve, index) => choice.append(make("option", { value: String(index) }, `rank ${curve.rank}, stage ${curve.stage}`)));
    const fullest = chart.curves.reduce((best, curve, index) => (curve.peak_bytes > chart.curves[best].peak_bytes ? index : best), 0);
    choice.value = String(fullest);
    const list = make("div", { class: "holders" });
    const title = make("span", {});
    const show = () => {
      const curve = chart.curves[Number(choice.value)];
      title.textContent = `holds ${bytes(curve.peak_bytes)} at its peak, ${time(curve.peak_seconds)} into the step` +
        (chart.limit ? `, of ${bytes(chart.limit)} that a device has` : "");
      list.replaceChildren();
      const widest = Math.max(...curve.holders.map((holder) => holder[3]), 1);
      for (const [name, purpose, count, size] of curve.holders) {
        const filled = make("i", {});
        filled.style.width = `${size / widest * 100}%`;
        const times = count > 1 && purpose ? ` × ${count}` : "";
        list.append(make("span", {}, name + times, " ", make("small", {}, purpose)), make("div", {}, filled), make("b", {}, bytes(size)));
      }
    };
    choice.addEventListener("change", show);
    root.append(make("div", { class: "bar" }, choice, title), list);
    show();
    if (chart.note) root.append(make("p", { class: "says" }, chart.note));
  }

  function loss(chart, root) {
    if (!chart.training.length && !chart.evaluation.length) { root.append("No loss was recorded."); return; }
    const columns = (points) => [points.map((point) => point[0]), points.map((point) => point[1])];
    const data = uPlot.join([columns(chart.training), columns(chart.evaluation)]);
    const value = (_, one) => (one == null ? "–" : figures(one));
    lines(root, data, [
      { label: "training", stroke: stroke(0), width: 1.6, value, points: { show: chart.training.length < 3 } },
      { label: "evaluation", stroke: stroke(1), width: 1.6, value, spanGaps: true, points: { show: true, size: 7 } },
    ], [axis({ label: "step" }), axis({ label: "loss", size: 58 })], { label: "Loss over steps", first: { label: "step" }, height: 320 });
  }

  function gap(chart, root) {
    if (!chart.points.length) { root.append("The search ended before it had a bound."); return; }
    const data = [chart.points.map((one) => one.seconds), chart.points.map((one) => one.best), chart.points.map((one) => one.bound),
      chart.points.map((one) => (one.bound > 0 ? (one.best / one.bound - 1) * 100 : null))];
    const value = (_, one) => (one == null ? "–" : time(one));
    lines(root, data, [
      { label: "best layout so far", stroke: stroke(0), width: 2, value, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }) },
      { label: "no layout is faster than", stroke: stroke(2), width: 2, value, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }) },
      { label: "gap", scale: "none", show: true, paths: () => null, points: { show: false }, value: (_, one) => (one == null ? "–" : figures(one) + " %") },
    ], [{ ...times, label: "time of the search" }, axis({ values: (_, ticks) => ticks.map(time), size: 84 })], {
      label: "Search: best layout and lower bound over time", first: { label: "after", value }, height: 320,
    });
  }

  function layouts(chart, root) {
    const points = chart.points;
    if (!points.length) { root.append("There are no layouts to show."); return; }
    const front = points.map((one) => (one.is_on_front ? one.step_seconds : null));
    const data = [points.map((one) => one.memory_bytes), points.map((one) => one.step_seconds), front];
    let chosen = points.reduce((best, one, index) => (one.step_seconds < points[best].step_seconds ? index : best), 0);
    const list = make("div", { class: "rows" });
    const detail = make("div", {});
    const mark = (plot) => {
      const { ctx } = plot;
      ctx.save();
      ctx.strokeStyle = css("--ink");
      ctx.lineWidth = 2.5 * devicePixelRatio;
      ctx.beginPath();
      ctx.arc(plot.valToPos(points[chosen].memory_bytes, "x", true), plot.valToPos(points[chosen].step_seconds, "y", true), 8 * devicePixelRatio, 0, 7);
      ctx.stroke();
      ctx.restore();
    };
    const value = (_, one) => (one == null ? "–" : time(one));
    const low = points[0].memory_bytes, high = points[points.length - 1].memory_bytes;
    const wide = Math.max((high - low) * 0.06, high * 0.02, 1);
    const { plot } = lines(root, data, [
      { label: "layout", stroke: stroke(7), paths: () => null, value, points: { show: true, size: 9, fill: stroke(7) } },
      { label: "on the front", stroke: stroke(0), width: 2, spanGaps: true, paths: uPlot.paths.stepped({ align: 1 }), value, points: { show: true, size: 10, fill: stroke(0) } },
    ], [axis({ label: "memory of the fullest device", values: (_, ticks) => ticks.map(bytes), incrs: powers, space: 90 }), axis({ label: "step", values: (_, ticks) => ticks.map(time), size: 78 })], {
      label: "Layouts by memory and step time; the list below chooses one by keyboard", height: 340,
      first: { label: "memory", value: (_, one) => (one == null ? "–" : bytes(one)) }, x: { range: () => [low - wide, high + wide] }, hooks: { draw: [mark] },
    });
    const choose = (index) => {
      chosen = index;
      [...list.children].forEach((button, at) => button.setAttribute("aria-pressed", String(at === index)));
      const rows = points[index].facts.map(([name, what]) => make("tr", {}, make("td", {}, name), make("td", {}, what)));
      detail.replaceChildren(make("table", {}, make("tbody", {}, ...rows)), make("pre", { tabindex: "0" }, points[index].plan));
      plot.redraw(false, true);
    };
    points.forEach((one, index) => list.append(make("button", { type: "button", onclick: () => choose(index) },
      `${time(one.step_seconds)}, ${bytes(one.memory_bytes)}${one.is_on_front ? ", on the front" : ""}: ${one.name}`)));
    plot.over.addEventListener("click", (event) => {
      let [best, near] = [-1, 24 ** 2];
      points.forEach((one, index) => {
        const away = (plot.valToPos(one.memory_bytes, "x") - event.offsetX) ** 2 + (plot.valToPos(one.step_seconds, "y") - event.offsetY) ** 2;
        if (away < near) [best, near] = [index, away];
      });
      if (best >= 0) choose(best);
    });
    root.append(list, detail);
    choose(chosen);
  }

  const kinds = { timeline, memory, loss, gap, layouts };
  for (const root of document.querySelectorAll("[data-chart]")) {
    const chart = charts[Number(root.dataset.chart)];
    root.replaceChildren();
    kinds[chart.chart](chart, root);
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraws.forEach((redraw) => redraw()));
})();
