(() => {
  "use strict";
  const top = document.getElementById("ff-top");
  const find = (selector) => top.querySelector(selector);
  const data = JSON.parse(find("#ff-data").textContent);
  const said = find("#ff-said");

  const make = (name, className, text) => {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  // --- copying and downloading
  const copy = async (text) => {
    const before = document.activeElement;
    let done = true;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // a page from a folder, or in a frame, may not use the clipboard directly
      const area = make("textarea");
      area.value = text;
      top.append(area);
      area.select();
      done = document.execCommand("copy");
      area.remove();
      before.focus();
    }
    said.textContent = done ? "copied" : "this browser does not let it be copied";
  };
  find(".ff-tools").hidden = false;
  find("#ff-copy").addEventListener("click", async () => {
    await copy(find("#ff-markdown").value);
  });
  find("#ff-download").addEventListener("click", () => {
    const link = make("a");
    link.href = URL.createObjectURL(new Blob([find("#ff-json").textContent], { type: "application/json" }));
    link.download = "firstfault.json";
    top.append(link);
    link.click();
    link.remove();
    said.textContent = "firstfault.json is on its way to your downloads";
  });
  for (const button of top.querySelectorAll(".ff-copy-one")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      await copy(button.previousElementSibling.textContent);
    });
  }

  // --- links within the report: in a frame of srcdoc an address with # leads nowhere
  top.addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#ff-"]');
    const target = link && find(link.getAttribute("href"));
    if (!target) return;
    event.preventDefault();
    for (let part = target; part; part = part.parentElement) if (part.tagName === "DETAILS") part.open = true;
    target.setAttribute("tabindex", "-1");
    target.focus();
    target.scrollIntoView();
  });
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...top.querySelectorAll("details:not([open])")];
    for (const part of opened) part.open = true;
  });
  addEventListener("afterprint", () => {
    for (const part of opened) part.open = false;
  });

  // --- the grid of ranks: pages, filters, arrow keys
  const grid = find("#ff-grid");
  const form = find(".ff-filter");
  if (grid) {
    const body = grid.tBodies[0];
    const detail = find("#ff-detail");
    const pages = find(".ff-pages");
    let start = data.first;
    let shown = data.ranks;

    const label = ([rank, state]) => `rank ${rank}, ${data.states[state][1]}`;
    const explain = ([rank, state, node, local, group, later, line]) => {
      const own = group === null ? null : data.groups[group - 1];
      const words = [`rank ${rank}${local === null ? "" : ` (local_rank ${local})`} on ${data.nodes[node][0] || "a node not known"}`];
      words.push(data.states[state][1] + (later && data.states[state][0] !== "root" ? `, ${later}` : ""));
      const text = line || (own && own[3]) || "";
      if (own) words.push(`error ${own[0]}`);
      return words.join("; ") + (text ? `: ${text}` : "");
    };
    const draw = () => {
      const rows = new Map();
      for (const item of shown.slice(start, start + data.size)) {
        if (!rows.has(item[2])) rows.set(item[2], []);
        rows.get(item[2]).push(item);
      }
      body.replaceChildren();
      for (const [node, items] of rows) {
        const row = make("tr");
        const head = make("th", "", data.nodes[node][1] || "node not known");
        head.title = data.nodes[node][0];
        head.scope = "row";
        if (data.nodes[node].length > 2) {
          const [slug, name, mark] = data.states[data.nodes[node][2]];
          const sign = make("span", `ff-mark ff-is-${slug}`, mark);
          sign.setAttribute("aria-hidden", "true");
          head.append(" ", sign, make("span", "ff-sr", name));
        }
        const cell = make("td");
        const cells = make("span", "ff-cells");
        for (const item of items) {
          const [slug, , mark] = data.states[item[1]];
          const button = make("button", `ff-cell ff-is-${slug}`, String(item[0]));
          button.type = "button";
          button.tabIndex = -1;
          button.setAttribute("aria-label", label(item));
          button.setAttribute("aria-pressed", "false");
          button.append(make("b", "", mark));
          button.addEventListener("click", () => {
            for (const other of body.querySelectorAll('[aria-pressed="true"]')) other.setAttribute("aria-pressed", "false");
            button.setAttribute("aria-pressed", "true");
            detail.hidden = false;
            detail.textContent = explain(item);
          });
          cells.append(button);
        }
        cell.append(cells);
        row.append(head, cell);
        body.append(row);
      }
      const first = body.querySelector(".ff-is-root.ff-cell") || body.querySelector(".ff-cell");
      if (first) first.tabIndex = 0;
      if (pages) {
        const end = Math.min(start + data.size, shown.length);
        pages.hidden = shown.length <= data.size;
        pages.querySelector('[data-to="-1"]').disabled = start === 0;
        pages.querySelector('[data-to="1"]').disabled = end >= shown.length;
        find("#ff-shown").textContent = `${start + 1} to ${end} of ${shown.length}`;
      }
      detail.hidden = true;
      form.querySelector("output").textContent = `${shown.length} of ${data.ranks.length} ranks`;
    };
    if (pages) {
      for (const button of pages.querySelectorAll("button")) {
        button.addEventListener("click", () => {
          start = Math.max(0, start + Number(button.dataset.to) * data.size);
          draw();
        });
      }
    }
    grid.addEventListener("keydown", (event) => {
      const cells = [...body.querySelectorAll(".ff-cell")];
      const at = cells.indexOf(document.activeElement);
      if (at < 0) return;
      const row = (step) => {
        const rows = [...body.rows];
        const index = rows.indexOf(cells[at].closest("tr"));
        const column = [...rows[index].querySelectorAll(".ff-cell")].indexOf(cells[at]);
        const next = rows[index + step];
        const there = next ? [...next.querySelectorAll(".ff-cell")] : [];
        return there.length ? there[Math.min(column, there.length - 1)] : undefined;
      };
      const moves = {
        ArrowRight: () => cells[at + 1], ArrowLeft: () => cells[at - 1],
        ArrowDown: () => row(1), ArrowUp: () => row(-1),
        Home: () => cells[0], End: () => cells[cells.length - 1],
      };
      const to = moves[event.key] && moves[event.key]();
      if (!to) return;
      event.preventDefault();
      cells[at].tabIndex = -1;
      to.tabIndex = 0;
      to.focus();
    });
    const wanted = (text) => {
      const ranges = [...text.matchAll(/(\d+)(?:\s*-\s*(\d+))?/g)].map(([, low, high]) => [Number(low), Number(high ?? low)]);
      return (rank) => !ranges.length || ranges.some(([low, high]) => rank >= low && rank <= high);
    };
    const filter = () => {
      const fields = form.elements;
      const isWanted = wanted(fields.ranks.value);
      const state = data.states.findIndex(([slug]) => slug === fields.state.value);
      const group = fields.group.value ? Number(fields.group.value) : null;
      const node = fields.node.value.trim();
      shown = data.ranks.filter((item) => isWanted(item[0]) && (state < 0 || item[1] === state)
        && (group === null || item[4] === group) && (!node || data.nodes[item[2]][0].includes(node)));
      start = 0;
      draw();
    };
    form.hidden = false;
    form.addEventListener("input", filter);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(() => { filter(); start = data.first; draw(); }));
    draw();
  }

  // --- groups of identical errors: pages
  const paging = find(".ff-group-pages");
  if (paging) {
    const rows = find("#ff-group-table").tBodies[0];
    let start = 0;
    const draw = () => {
      rows.replaceChildren();
      for (const [number, state, what, line, count, ranks, later] of data.groups.slice(start, start + data.rows)) {
        const [slug, name, mark] = data.states[state];
        const row = make("tr");
        row.id = `ff-group-${number}`;
        const sign = make("span", `ff-mark ff-is-${slug}`, mark);
        sign.setAttribute("aria-hidden", "true");
        const stateCell = make("td", "ff-state");
        stateCell.append(sign, ` ${name}`);
        const text = make("td", "ff-text", `${line || what} `);
        if (later && slug !== "root") text.append(make("span", "ff-when", later));
        row.append(make("td", "", String(number)), stateCell, make("td", "", String(count)), make("td", "", ranks), text);
        rows.append(row);
      }
      const end = Math.min(start + data.rows, data.groups.length);
      paging.querySelector('[data-to="-1"]').disabled = start === 0;
      paging.querySelector('[data-to="1"]').disabled = end >= data.groups.length;
      paging.querySelector("span").textContent = `${start + 1} to ${end} of ${data.groups.length}`;
    };
    paging.hidden = false;
    for (const button of paging.querySelectorAll("button")) {
      button.addEventListener("click", () => {
        start = Math.max(0, start + Number(button.dataset.to) * data.rows);
        draw();
      });
    }
    draw();
  }
})();
