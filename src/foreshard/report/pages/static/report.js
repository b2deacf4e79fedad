"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const p = data.prediction;

  // --- building blocks -------------------------------------------------------------------------
  const SVG = "http://www.w3.org/2000/svg";
  const fill = (node, attrs, kids) => {
    for (const [key, value] of Object.entries(attrs || {})) {
      if (key === "text") node.textContent = value;
      else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
    }
    for (const kid of kids.flat(3)) if (kid !== null && kid !== undefined && kid !== "") node.append(kid);
    return node;
  };
  const h = (tag, attrs, ...kids) => fill(document.createElement(tag), attrs, kids);
  const scrolled = (table) => h("div", { class: "wide" }, table);
  const s = (tag, attrs, ...kids) => fill(document.createElementNS(SVG, tag), attrs, kids);
  const digits = (x, n = 3) => {
    if (!x) return "0";
    const places = Math.max(0, n - 1 - Math.floor(Math.log10(Math.abs(x)) + 1e-9));
    return x.toLocaleString("en", { minimumFractionDigits: Math.min(places, 9), maximumFractionDigits: Math.min(places, 9) });
  };
  const time = (x) => Math.abs(x) >= 1 ? digits(x) + " s" : Math.abs(x) >= 1e-3 ? digits(x * 1e3) + " ms" : digits(x * 1e6) + " us";
  const SIZES = { GiB: 2 ** 30, MiB: 2 ** 20, KiB: 2 ** 10 };
  const sizeOf = (x) => !x ? "GiB" : x >= 0.05 * SIZES.GiB ? "GiB" : x >= 0.5 * SIZES.MiB ? "MiB" : "KiB";
  const sized = (x, unit) => {
    const value = x / SIZES[unit];
    return value >= 0.05 || !value ? value.toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 }) : digits(value, 2);
  };
  const memory = (x) => `${sized(x, sizeOf(x))} ${sizeOf(x)}`;
  const percent = (x) => (100 * x).toFixed(1) + " %";
  const colour = (part) => `var(--${part})`;
  const nameOf = (part) => data.names[part] || part;
  const memoryName = (part) => part === "optimizer" ? "optimizer states" : nameOf(part);
  const section = (title, lead, ...kids) =>
    h("section", { "aria-label": title }, h("h2", { text: title }), lead && h("p", { class: "lead", text: lead }), kids);
  const swatch = (part) => h("span", { class: "swatch" + (part === "bubble" ? " hatched" : ""), style: `background-color:${colour(part)}` });

  // --- tooltip ---------------------------------------------------------------------------------
  const tip = h("div", { class: "tip", role: "presentation" });
  const showTip = (text, x, y) => {
    tip.textContent = text;
    tip.style.display = "block";
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
    tip.style.top = (y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18) + "px";
  };
  const hideTip = () => { tip.style.display = "none"; };
  const tipped = (text) => ({ onmousemove: (e) => showTip(text, e.clientX, e.clientY), onmouseleave: hideTip });

  // --- head ------------------------------------------------------------------------------------
  const THEMES = ["auto", "light", "dark"];
  const system = matchMedia("(prefers-color-scheme: dark)");
  let theme = "auto";
  try { theme = localStorage.getItem("foreshard-theme") || "auto"; } catch { /* private files have no storage */ }
  const themeButton = h("button", { type: "button", onclick: () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % 3];
    try { localStorage.setItem("foreshard-theme", theme); } catch { /* as above */ }
    applyTheme();
  } });
  const applyTheme = () => {
    document.documentElement.dataset.theme = theme === "auto" ? (system.matches ? "dark" : "light") : theme;
    themeButton.textContent = "Theme: " + theme;
  };
  system.addEventListener("change", applyTheme);
  applyTheme();

  const head = () => [
    h("header", { class: "top" },
      h("div", {},
        h("h1", {}, data.title, h("span", { class: "on", text: " on " }), data.cluster),
        h("p", { class: "plan-line", text: data.planLine })),
      themeButton),
    h("div", { class: "boxes" }, data.boxes.map((box) =>
      h("div", { class: "box" + (box.alarm ? " alarm" : "") },
        h("h3", { text: box.title }), h("div", { class: "value", text: box.value }), h("div", { class: "note", text: box.note })))),
    h("p", { class: "speed", text: data.speedLine }),
  ];

  // --- tables with a swatch ----------------------------------------------------------------------
  const partTable = (columns, rows, total) => h("table", {},
    h("thead", {}, h("tr", {}, columns.map((c, i) => h("th", { class: i ? "n" : "", scope: "col", text: c })))),
    h("tbody", {}, rows.map(([part, name, ...cells]) =>
      h("tr", {}, h("td", {}, swatch(part), name), cells.map((c) => h("td", { class: "n", text: c }))))),
    h("tfoot", {}, h("tr", {}, total.map((c, i) => h("td", { class: i ? "n" : "", text: c })))));
  const stack = (parts, whole, label, note) => h("div", { class: "stack", role: "img", "aria-label": label },
    parts.map(([part, value]) => h("span", {
      class: part === "bubble" ? "hatched" : "",
      style: `width:${100 * value / whole}%;background-color:${colour(part)}`, ...tipped(note(part, value)) })));

  const timeSection = () => {
    const parts = data.timeParts.map((part) => [part, p.time_breakdown_s[part] || 0]).filter(([, value]) => value > 0);
    const words = (part, value) => `${nameOf(part)}\n${time(value)}, ${percent(value / p.step_time_s)} of the step`;
    return section("Where the time goes", "Exposed time on the critical rank; the parts sum to the step.",
      stack(parts, p.step_time_s, "Parts of the step", words),
      partTable(["part", "time", "share"], parts.map(([part, value]) => [part, nameOf(part), time(value), percent(value / p.step_time_s)]),
        ["step", time(p.step_time_s), "100.0 %"]));
  };

  // --- memory ------------------------------------------------------------------------------------
  const memorySection = () => {
    const m = p.memory;
    const parts = data.memoryParts.map((part) => [part, m.breakdown_bytes[part] || 0]).filter(([, value]) => value > 0);
    const scale = Math.max(...data.stages.map((one) => Math.max(one.peak, one.capacity)));
    const many = p.plan.groups.length > 1, unit = sizeOf(m.peak_bytes);
    const rows = data.stages.map((one) => {
      const bars = data.memoryParts.map((part) => [part, one.parts[part] || 0]).filter(([, value]) => value > 0);
      const words = (part, value) => `${memoryName(part)}\n${memory(value)}`;
      return [
        h("div", { class: "label" + (one.fullest ? " fullest" : ""), text: (many ? `group ${one.group} ` : "") + `stage ${one.stage}` + (one.device ? ` · ${one.device}` : "") }),
        h("div", { class: "meter" }, stack(bars, scale, `stage ${one.stage}: ${memory(one.peak)} of ${memory(one.capacity)}`, words),
          h("span", { class: "limit", style: `left:${100 * one.capacity / scale}%`, ...tipped(`capacity ${memory(one.capacity)}`) })),
        h("div", { class: "label n", text: `${memory(one.peak).replace(" GiB", "")} / ${memory(one.capacity)}` })];
    });
    const lead = "Peak of each stage in its parts; the red line is the capacity of its devices. Below, the fullest rank.";
    return section("Memory by stage", lead, h("div", { class: "memory" }, rows),
      partTable([`fullest: rank ${m.peak_rank}`, unit, "of capacity"],
        parts.map(([part, value]) => [part, memoryName(part), sized(value, unit), percent(value / m.capacity_bytes)]),
        ["peak", sized(m.peak_bytes, unit), percent(m.peak_bytes / m.capacity_bytes)]));
  };

  // --- groups of unequal speed -------------------------------------------------------------------
  const groupsSection = () => {
    const t = data.groupTimes;
    if (!t) return null;
    const left = (i) => t.columns[i].startsWith(">") ? "n" : "";
    return section("Groups", "Each group works on its share of the samples; the fast ones then wait for the slowest.",
      scrolled(h("table", {}, h("thead", {}, h("tr", {}, t.columns.map((c, i) => h("th", { class: left(i), scope: "col", text: c.replace(">", "") })))),
        h("tbody", {}, t.rows.map((row) => h("tr", {}, row.map((c, i) => h("td", { class: left(i), text: c }))))))));
  };

  // --- what would help ---------------------------------------------------------------------------
  const adviceSection = () => {
    if (data.verdict) return section("What would help", "", h("p", { class: "verdict", text: "The plan " + data.verdict }));
    if (!data.advice.length) return section("What would help", "No single change of the plan wins one per cent or more.");
    const best = Math.max(...data.advice.map((one) => one.gain));
    return section("What would help", "Changes that fit, each predicted anew, the best of its kind; gain in " + data.counts + " per second.",
      scrolled(h("table", {}, h("thead", {}, h("tr", {}, ["change", "gain", "", "step", "peak"].map((c, i) => h("th", { class: [1, 3, 4].includes(i) ? "n" : "", scope: "col", text: c })))),
        h("tbody", {}, data.advice.map((one) => h("tr", {}, h("td", {}, h("code", { text: one.change })),
          h("td", { class: "n", text: "+" + percent(one.gain) }),
          h("td", { style: "width:34%" }, h("span", { class: "bar", style: `width:${100 * one.gain / best}%` })),
          h("td", { class: "n", text: one.step }), h("td", { class: "n", text: one.peak })))))));
  };

  // --- the step as a Gantt chart -----------------------------------------------------------------
  const tl = data.timeline || { step: p.step_time_s, tick: 1, tracks: [] };
  const tracks = tl.tracks.map((track) => {
    let clock = 0;
    const tasks = track.tasks.map(([gap, length, name, part, mb, chunk]) => {
      const start = clock + gap;
      clock = start + length;
      return { start: start * tl.tick, end: clock * tl.tick, name: tl.names[name], part: tl.parts[part], mb, chunk };
    });
    return { ...track, tasks };
  });
  const taskColour = (task) => task.part === "compute" && task.name.startsWith("backward") ? colour("backward") : colour(task.part);
  const taskWords = (track, task) => [
    `${task.name.replace(/_/g, " ")}${task.mb >= 0 ? `, micro-batch ${task.mb}` : ""}${task.chunk > 0 ? `, chunk ${task.chunk}` : ""}`,
    `${time(task.end - task.start)}, from ${time(task.start)} to ${time(task.end)}`,
    `rank ${track.rank}, stage ${track.stage}, ${track.stream.replace(/_/g, " ")} · ${nameOf(task.part)}`].join("\n");

  const ganttSection = () => {
    if (!tracks.length) return section("The step as it runs", "This engine gives no timeline.");
    const rankWidth = 8 + 7.5 * Math.max(...tracks.map((track) => `rank ${track.rank}`.length));
    const LABEL = rankWidth + 124, ROW = 18, GAP = 8, TOP = 26;
    let view = [0, tl.step], picked = null, rows = [];
    const told = h("p", { class: "told", "aria-live": "polite" });
    const svg = s("svg", { role: "img", "aria-label": "Gantt chart of the predicted step" });
    const holder = h("div", { class: "gantt", tabindex: "0", role: "application", "aria-label": "Gantt chart; arrows pan, plus and minus zoom, n and p step through tasks, up and down change the track" }, svg);
    let y = TOP;
    tracks.forEach((track, i) => {
      if (i && (track.rank !== tracks[i - 1].rank)) y += GAP;
      rows.push({ track, y });
      y += ROW;
    });
    const height = y + 8;
    const width = () => Math.max(360, holder.clientWidth - 2);
    const xOf = (t) => LABEL + (t - view[0]) / (view[1] - view[0]) * (width() - LABEL - 10);
    const tOf = (x) => view[0] + (x - LABEL) / (width() - LABEL - 10) * (view[1] - view[0]);
    const firstAt = (tasks, t) => {
      let low = 0, high = tasks.length;
      while (low < high) { const mid = (low + high) >> 1; if (tasks[mid].end < t) low = mid + 1; else high = mid; }
      return low;
    };
    const ticks = () => {
      const raw = (view[1] - view[0]) / 8, base = 10 ** Math.floor(Math.log10(raw));
      const step = [1, 2, 5, 10].map((m) => m * base).find((m) => m >= raw);
      const out = [];
      for (let t = Math.ceil(view[0] / step) * step; t <= view[1]; t += step) out.push(t);
      return out;
    };
    const drawRow = ({ track, y: top }, nodes) => {
      let run = null;
      const flush = () => {
        if (run) nodes.push(s("rect", { x: run.x, y: top + 1, width: Math.max(0.7, run.x2 - run.x), height: ROW - 2, fill: run.fill, class: run.task === picked ? "picked" : null }));
        run = null;
      };
      for (let i = firstAt(track.tasks, view[0]); i < track.tasks.length && track.tasks[i].start <= view[1]; i++) {
        const task = track.tasks[i];
        const x = Math.max(LABEL, xOf(task.start)), x2 = Math.min(width() - 10, xOf(task.end));
        const wide = x2 - x >= 3;
        const shade = taskColour(task);
        if (run && !wide && run.fill === shade && x - run.x2 < 0.8) { run.x2 = Math.max(run.x2, x2); continue; }
        flush();
        run = { x, x2: wide ? x2 - 0.6 : x2, fill: shade, task };
        if (x2 - x > 20 && task.mb >= 0) { flush(); nodes.push(s("text", { x: (x + x2) / 2, y: top + 13, "text-anchor": "middle", style: "fill:#fff;font-size:11px;pointer-events:none", text: task.mb })); }
      }
      flush();
    };
    const draw = () => {
      const nodes = [s("defs", {}, s("pattern", { id: "hatch", width: 8, height: 8, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
        s("rect", { width: 8, height: 8, fill: "var(--card)" }), s("rect", { width: 3, height: 8, fill: "var(--line)" })))];
      for (const { y: top } of rows) nodes.push(s("rect", { class: "lane", x: LABEL, y: top + 1, width: width() - LABEL - 10, height: ROW - 2 }));
      for (const t of ticks()) {
        nodes.push(s("line", { class: "rule", x1: xOf(t), x2: xOf(t), y1: TOP - 6, y2: height }));
        const edge = xOf(t) > width() - 36;
        nodes.push(s("text", { class: "soft", x: edge ? width() - 6 : xOf(t), y: 14, "text-anchor": edge ? "end" : "middle", text: t ? time(t) : "0" }));
      }
      rows.forEach((row, i) => {
        const head = !i || rows[i - 1].track.rank !== row.track.rank;
        if (head) nodes.push(s("text", { x: 8, y: row.y + 13, text: `rank ${row.track.rank}` }));
        nodes.push(s("text", { class: "soft", x: rankWidth + 8, y: row.y + 13, text: row.track.stream.replace(/_/g, " ").slice(0, 18) }));
        drawRow(row, nodes);
      });
      if (tl.hidden && tl.hidden.to > view[0] && tl.hidden.from < view[1]) {
        const a = Math.max(LABEL, xOf(tl.hidden.from)), b = Math.min(width() - 10, xOf(tl.hidden.to));
        nodes.push(s("rect", { x: a, y: TOP, width: Math.max(0, b - a), height: height - TOP, fill: "url(#hatch)" }));
        nodes.push(s("text", { x: (a + b) / 2, y: (TOP + height) / 2, "text-anchor": "middle", text: `${tl.hidden.count.toLocaleString("en")} tasks not drawn` }));
      }
      svg.setAttribute("viewBox", `0 0 ${width()} ${height}`);
      svg.setAttribute("height", height);
      svg.replaceChildren(...nodes);
    };
    const look = (from, to) => {
      const span = Math.min(tl.step, Math.max(tl.step / 1e5, to - from));
      const start = Math.min(Math.max(0, from), tl.step - span);
      view = [start, start + span];
      draw();
    };
    const zoom = (factor, at = (view[0] + view[1]) / 2) => look(at - (at - view[0]) * factor, at + (view[1] - at) * factor);
    const pan = (share) => { const d = share * (view[1] - view[0]); look(view[0] + d, view[1] + d); };
    const under = (e) => {
      const box = svg.getBoundingClientRect();
      const x = e.clientX - box.left, at = e.clientY - box.top;
      const row = rows.find((one) => at >= one.y && at < one.y + ROW);
      if (!row || x < LABEL) return null;
      const t = tOf(x), task = row.track.tasks[firstAt(row.track.tasks, t)];
      return task && task.start <= t ? { track: row.track, task } : null;
    };
    let drag = null, index = -1, line = 0;
    svg.addEventListener("wheel", (e) => {
      if (!e.ctrlKey && !e.shiftKey) return;
      e.preventDefault();
      zoom((e.deltaY || e.deltaX) > 0 ? 1.25 : 0.8, tOf(e.clientX - svg.getBoundingClientRect().left));
    }, { passive: false });
    svg.addEventListener("dblclick", (e) => zoom(0.4, tOf(e.clientX - svg.getBoundingClientRect().left)));
    svg.addEventListener("pointerdown", (e) => { drag = { x: e.clientX, view: [...view] }; svg.classList.add("drag"); });
    addEventListener("pointerup", () => { drag = null; svg.classList.remove("drag"); });
    svg.addEventListener("pointermove", (e) => {
      if (drag) {
        const d = (drag.x - e.clientX) / (width() - LABEL - 10) * (drag.view[1] - drag.view[0]);
        hideTip();
        return look(drag.view[0] + d, drag.view[1] + d);
      }
      const hit = under(e);
      if (hit) showTip(taskWords(hit.track, hit.task), e.clientX, e.clientY); else hideTip();
    });
    svg.addEventListener("pointerleave", hideTip);
    const pick = (move) => {
      const tasks = rows[line].track.tasks;
      index = Math.min(tasks.length - 1, Math.max(0, index < 0 ? firstAt(tasks, view[0]) : index + move));
      picked = tasks[index];
      if (picked.end > view[1] || picked.start < view[0]) look(picked.start - (view[1] - view[0]) / 4, picked.start + 3 * (view[1] - view[0]) / 4);
      else draw();
      told.textContent = taskWords(rows[line].track, picked).replace(/\n/g, "; ");
    };
    const KEYS = {
      ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1.43),
      0: () => look(0, tl.step), n: () => pick(1), p: () => pick(-1),
      ArrowDown: () => { line = Math.min(rows.length - 1, line + 1); index = -1; pick(0); },
      ArrowUp: () => { line = Math.max(0, line - 1); index = -1; pick(0); } };
    holder.addEventListener("keydown", (e) => {
      if (!KEYS[e.key] || e.ctrlKey || e.metaKey || e.altKey) return;
      e.preventDefault();
      KEYS[e.key]();
    });
    addEventListener("resize", draw);
    addEventListener("beforeprint", () => look(0, tl.step));
    requestAnimationFrame(draw);
    const shades = [...new Set(tracks.flatMap((t) => t.tasks.map((task) => task.part)))];
    const legend = h("ul", { class: "legend" }, shades.flatMap((part) => part === "compute"
      ? [["compute", "forward"], ["backward", "backward"]] : [[part, nameOf(part).replace(", exposed", "")]])
      .map(([part, name]) => h("li", {}, swatch(part), name)));
    const asPredicted = Math.abs(tl.step / p.step_time_s - 1) < 1e-6 ? "" : ` Drawn as predicted, ${time(tl.step)}: the measured step scales no task.`;
    return section("The step as it runs", "One rank for each stage; the others of the stage do the same. Numbers are micro-batches; empty lanes are waiting." + asPredicted,
      h("div", { class: "gantt-tools" },
        [["Zoom in", () => zoom(0.5)], ["Zoom out", () => zoom(2)], ["Earlier", () => pan(-0.3)], ["Later", () => pan(0.3)], ["Whole step", () => look(0, tl.step)]]
          .map(([text, act]) => h("button", { type: "button", onclick: act, text })),
        h("span", { class: "hint", text: "drag to pan · Ctrl+wheel to zoom · keys: arrows + - 0 n p" })),
      holder, told, legend);
  };

  // --- the plan ----------------------------------------------------------------------------------
  const spanWords = ([a, b]) => b - a === 1 ? `${a}` : `${a}-${b - 1}`;
  const many = (n, one, more = one + "s") => `${n.toLocaleString("en")} ${n === 1 ? one : more}`;
  const planSection = () => {
    const layers = Math.max(...data.groups.flatMap((g) => g.stages.flatMap((st) => st.layers.map(([, stop]) => stop))));
    const shade = (i, n) => `color-mix(in oklab, var(--compute), var(--data_comm) ${n > 1 ? Math.round(100 * i / (n - 1)) : 0}%)`;
    const drawings = data.groups.map((group) => {
      const n = group.stages.length;
      const boxes = group.stages.map((st, i) => {
        const degrees = [["tp", st.tp], ["cp", st.cp], ["dp", st.dp], ["ep", st.ep]].filter(([, d]) => d > 1).map(([k, d]) => `${k} ${d}`).join(" · ") || "one rank";
        return h("div", { class: "stage", style: `border-color:${shade(i, n)}` },
          h("strong", { text: `stage ${i}` }), h("div", { text: `layers ${st.layers.map(spanWords).join(", ")}` }),
          h("div", { text: `ranks ${st.ranks}` }), h("div", { text: degrees + (st.recompute !== "none" ? ` · recompute ${st.recompute}` : "") }));
      });
      const strip = group.stages.flatMap((st, i) => st.layers.map(([a, b]) => [a, h("span", {
        style: `width:${100 * (b - a) / layers}%;background-color:${shade(i, n)}`, ...tipped(`layers ${spanWords([a, b])} on stage ${i}`) })]))
        .sort(([a], [b]) => a - b).map(([, node]) => node);
      return [h("p", { class: "plan-line", text: `${group.count > 1 ? `${group.count} groups, each: ` : ""}${many(group.share, "sample")} a step in ${many(group.microBatches, "micro-batch", "micro-batches")} of ${group.microBatch}, ${group.schedule}` }),
        h("div", { class: "stages" }, boxes),
        h("div", { class: "stack strip", role: "img", "aria-label": "Layers by stage" }, strip),
        h("div", { class: "ends" }, h("span", { text: "0: embedding" }), h("span", { text: `${layers - 1}: head` }))];
    });
    return section("The plan", "Pipeline stages with their ranks; the strip shows which stage holds which layers.", drawings);
  };

  // --- the network -------------------------------------------------------------------------------
  const networkSection = () => {
    const n = data.network;
    if (!n) return null;
    return section("The network", n.why || "Devices below, what joins them above; wider lines carry more. Rates are those of datasheets.",
      n.image && scrolled(h("img", { class: "network", src: n.image, alt: `Links of ${data.cluster}` })));
  };

  // --- what it rests on --------------------------------------------------------------------------
  const restsSection = () => {
    const pretty = JSON.stringify(p.plan, null, 1).replace(/\[\s+([\d,\s]+?)\s+\]/g, (all) => all.replace(/\s+/g, ""));
    const save = (name, text) => {
      const link = h("a", { href: "data:application/json;charset=utf-8," + encodeURIComponent(text), download: name });
      link.click();
    };
    const explained = Object.entries(p.explain || {});
    return section("Assumptions and sources", `${p.engine} engine, ${p.costs} costs, ${p.fidelity}; evidence: ${p.evidence}.`,
      h("ol", {}, p.assumptions.map((text) => h("li", { text }))),
      explained.length ? h("details", {}, h("summary", { text: "How each number comes about" }),
        h("dl", {}, explained.map(([key, text]) => [h("dt", { text: key.replace(/_/g, " ") }), h("dd", { text })]))) : null,
      h("details", {}, h("summary", { text: "Plan file" }), h("pre", { tabindex: "0", text: pretty })),
      h("p", {}, h("button", { type: "button", text: "Save plan.json", onclick: () => save("plan.json", JSON.stringify(p.plan, null, 2)) }), " ",
        h("button", { type: "button", text: "Save prediction.json", onclick: () => save("prediction.json", JSON.stringify(p, null, 2)) })));
  };

  document.getElementById("app").replaceWith(h("main", {}, head(), timeSection(), groupsSection() || "", memorySection(), adviceSection(), ganttSection(), planSection(), networkSection() || "", restsSection(),
    h("footer", { text: `Predicted by foreshard in ${time(p.predict_s)}; nothing was run. Framework ${p.framework}, catalog ${p.catalog_version || "unversioned"}. ${Math.round(100 * p.interval)} % interval ${time(p.step_time_interval_s[0])} to ${time(p.step_time_interval_s[1])}.` })), tip);
})();
