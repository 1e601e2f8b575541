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
    said.textContent = done ? "copied" : "this browser does not allow copying";
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
    said.textContent = "downloading firstfault.json";
  });
  for (const button of top.querySelectorAll(".ff-copy-one")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      await copy(button.previousElementSibling.textContent);
    });
  }

  // --- links within the report
  const withoutHash = (address) => address.split("#")[0];
  top.addEventListener("click", (event) => {
    if (event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    const link = event.target.closest('a[href^="#ff-"]');
    const target = link && find(link.getAttribute("href"));
    if (!target) return;
    for (let part = target; part; part = part.parentElement) if (part.tagName === "DETAILS") part.open = true;
    target.setAttribute("tabindex", "-1");
    // scrolled by what follows: Back returns to where the page stands now
    target.focus({ preventScroll: true });
    // in a frame of srcdoc the link leads to another page
    if (withoutHash(link.href) === withoutHash(location.href)) return;
    event.preventDefault();
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

  // --- attempts as tabs
  const tablist = find(".ff-tabs");
  if (tablist) {
    const tabs = [...tablist.querySelectorAll("[role=tab]")];
    const panelOf = (tab) => find(`#${tab.getAttribute("aria-controls")}`);
    const choose = (chosen) => {
      for (const tab of tabs) {
        tab.setAttribute("aria-selected", String(tab === chosen));
        tab.tabIndex = tab === chosen ? 0 : -1;
        panelOf(tab).hidden = tab !== chosen;
      }
    };
    for (const tab of tabs) {
      panelOf(tab).setAttribute("role", "tabpanel");
      tab.addEventListener("click", () => choose(tab));
    }
    tablist.addEventListener("keydown", (event) => {
      const at = tabs.indexOf(document.activeElement);
      const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 };
      if (at < 0 || !(event.key in moves)) return;
      event.preventDefault();
      const to = tabs[(moves[event.key] + tabs.length) % tabs.length];
      choose(to);
      to.focus();
    });
    tablist.hidden = false;
    choose(tabs.find((tab) => tab.getAttribute("aria-selected") === "true") || tabs[tabs.length - 1]);
  }

  // --- search: errors, frames, stacks and logs that hold a text; matches are marked where the browser can
  let showGroup = () => {};
  const most = 50;
  const field = find("#ff-search");
  const places = [...top.querySelectorAll("pre, .ff-frame, .ff-own > summary, section[aria-labelledby=ff-evidence] li, .ff-facts dd")]
    .filter((part) => part.textContent.trim());
  const nameOf = (part) => part.getAttribute("aria-label") || part.textContent.trim().slice(0, 60);
  const sectionOf = (part) => (part.closest("section, .ff-part") || top).querySelector("h2");
  const marked = (part, text, ranges) => {
    const walker = document.createTreeWalker(part, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      const small = node.data.toLowerCase();
      const lower = small.length === node.data.length ? small : node.data; // of some letters the small form is longer
      for (let at = lower.indexOf(text); at >= 0 && ranges.length < 500; at = lower.indexOf(text, at + text.length)) {
        const range = new Range();
        range.setStart(node, at);
        range.setEnd(node, at + text.length);
        ranges.push(range);
      }
    }
  };
  const search = () => {
    const text = field.value.trim().toLowerCase();
    const found = find("#ff-found");
    const ranges = [];
    found.replaceChildren();
    let count = 0;
    const add = (label, go) => {
      count += 1;
      if (count > most) return;
      const item = make("li");
      const button = make("button", "", label);
      button.type = "button";
      button.addEventListener("click", go);
      item.append(button);
      found.append(item);
    };
    if (text) {
      for (const [number, , what, line] of data.groups) {
        if (`${what} ${line}`.toLowerCase().includes(text)) {
          add(`error ${number}: ${(line || what).slice(0, 80)}`, () => {
            showGroup(number);
            const row = find(`#ff-group-${number}`) || find("#ff-groups");
            row.setAttribute("tabindex", "-1");
            row.scrollIntoView();
            row.focus({ preventScroll: true });
          });
        }
      }
      for (const part of places) {
        if (!part.textContent.toLowerCase().includes(text)) continue;
        marked(part, text, ranges);
        add(`${sectionOf(part) ? `${sectionOf(part).textContent}: ` : ""}${nameOf(part)}`, () => {
          for (let box = part; box; box = box.parentElement) if (box.tagName === "DETAILS") box.open = true;
          const panel = part.closest(".ff-attempt");
          if (panel && panel.hidden) find(`[aria-controls="${panel.id}"]`).click();
          part.scrollIntoView({ block: "center" });
          if (!part.hasAttribute("tabindex") && part.tagName !== "SUMMARY") part.setAttribute("tabindex", "-1");
          part.focus({ preventScroll: true });
        });
      }
    }
    if (window.CSS && CSS.highlights) {
      CSS.highlights.delete("ff-hit");
      if (ranges.length) CSS.highlights.set("ff-hit", new Highlight(...ranges));
    }
    found.hidden = !count;
    find("#ff-hits").textContent = !text ? "" : count > most ? `${count} places, the first ${most} are listed` : `${count} ${count === 1 ? "place" : "places"}`;
  };
  if (field) {
    find(".ff-search").hidden = false;
    field.addEventListener("input", search);
  }

  // --- pages; a button that leads nowhere keeps the focus
  const isOff = (button) => button.getAttribute("aria-disabled") === "true";
  const turnedBy = (pages, turn) => {
    for (const button of pages.querySelectorAll("button")) {
      button.addEventListener("click", () => isOff(button) || turn(Number(button.dataset.to)));
    }
  };
  const markEnds = (pages, isFirst, isLast) => {
    pages.querySelector('[data-to="-1"]').setAttribute("aria-disabled", String(isFirst));
    pages.querySelector('[data-to="1"]').setAttribute("aria-disabled", String(isLast));
  };
  const cut = (text, width) => (text.length > width ? `${text.slice(0, width - 3)}...` : text);

  // --- the grid of ranks: pages, filters, arrow keys
  const grid = find("#ff-grid");
  const form = find(".ff-filter");
  if (grid) {
    const body = grid.tBodies[0];
    const detail = find("#ff-detail");
    const pages = find(".ff-pages");
    const opening = data.foremost - (data.foremost % data.size);
    let start = opening;
    let shown = data.ranks;

    const isWhole = () => shown.length === data.ranks.length;
    const label = ([rank, state]) => `rank ${rank}, ${data.states[state][1]}`;
    const groupOf = ([, , , , group]) => (group === null ? null : data.groups[group - 1]);
    const lineOf = (item) => item[6] || (groupOf(item) || [])[3] || "";
    const tell = (text) => {
      detail.textContent = text;
      top.style.setProperty("--ff-detail", `${detail.offsetHeight}px`);
    };
    const explain = (item) => {
      const [rank, state, node, local, , later] = item;
      const own = groupOf(item);
      const text = lineOf(item);
      const words = [`rank ${rank}${local === null ? "" : ` (local rank ${local})`} on ${data.nodes[node][0] || "an unknown node"}`];
      words.push(data.states[state][1] + (later && data.states[state][0] !== "root" ? `, ${later}` : ""));
      if (own) words.push(`error ${own[0]}`);
      return words.join(", ") + (text ? `: ${text}` : "");
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
        const head = make("th", "", data.nodes[node][1] || "unknown node");
        head.title = data.nodes[node][0];
        head.scope = "row";
        if (data.nodes[node].length > 2) {
          const [slug, name] = data.states[data.nodes[node][2]];
          head.append(" ", make("span", `ff-mark ff-is-${slug}`, name));
        }
        const cell = make("td");
        const cells = make("span", "ff-cells");
        for (const item of items) {
          const [slug, name] = data.states[item[1]];
          const button = make("button", `ff-cell ff-is-${slug}`, String(item[0]));
          button.type = "button";
          button.tabIndex = -1;
          button.setAttribute("aria-label", label(item));
          button.setAttribute("aria-pressed", "false");
          button.title = cut(lineOf(item), 120);
          if (item === data.ranks[data.foremost]) button.dataset.foremost = "";
          button.append(make("b", "", name));
          button.addEventListener("click", () => {
            for (const other of body.querySelectorAll('[aria-pressed="true"]')) other.setAttribute("aria-pressed", "false");
            button.setAttribute("aria-pressed", "true");
            tell(explain(item));
          });
          cells.append(button);
        }
        cell.append(cells);
        row.append(head, cell);
        body.append(row);
      }
      const first = body.querySelector("[data-foremost]") || body.querySelector(".ff-cell");
      if (first) first.tabIndex = 0;
      if (pages) {
        const seen = shown.slice(start, start + data.size);
        pages.hidden = shown.length <= data.size;
        markEnds(pages, start === 0, start + data.size >= shown.length);
        find("#ff-shown").textContent = pages.hidden ? ""
          : `ranks ${seen[0][0]} to ${seen[seen.length - 1][0]}; ${seen.length} of ${shown.length}${isWhole() ? "" : " that match"}`;
      }
      tell("Choose a rank (arrow keys, Enter) to see what happened to it.");
    };
    if (pages) {
      turnedBy(pages, (by) => {
        start += by * data.size;
        draw();
      });
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
    // "0-63, 70", "307-", "-20", "5 to 9": [low, high] of each, or what is none of these
    const rangesOf = (text) => {
      const ranges = [];
      for (const token of text.replace(/\s*(?:[-\u2010-\u2015\u2212:]|\.{2,3}|\bto\b)\s*/gi, "-").split(/[\s,;]+/)) {
        const [, low, dash, high] = /^(\d*)(-?)(\d*)$/.exec(token) || [];
        if (low === undefined || token === "-") return { ranges: [], wrong: token };
        const ends = dash ? [Number(low), high ? Number(high) : Infinity] : [Number(low), Number(low)];
        if (token) ranges.push([Math.min(...ends), Math.max(...ends)]);
      }
      return { ranges, wrong: "" };
    };
    // a whole name is that node's alone: worker-7 is not worker-70
    const nodesOf = (text) => {
      const exact = data.nodes.filter((node) => text === node[0] || text === node[1]);
      const part = text.toLowerCase();
      return new Set(text && exact.length ? exact : data.nodes.filter(([name]) => name.toLowerCase().includes(part)));
    };
    const filter = () => {
      const { ranks, state, group, node } = form.elements;
      const { ranges, wrong } = rangesOf(ranks.value);
      const nodes = nodesOf(node.value.trim());
      shown = data.ranks.filter((item) => (!ranges.length || ranges.some(([low, high]) => item[0] >= low && item[0] <= high))
        && (!state.value || data.states[item[1]][0] === state.value)
        && (!group.value || item[4] === Number(group.value)) && nodes.has(data.nodes[item[2]]));
      ranks.setAttribute("aria-invalid", String(Boolean(wrong)));
      const count = `${shown.length} of ${data.ranks.length} ranks`;
      find("#ff-count").textContent = wrong ? `not a range: ${wrong}; ${count}` : count;
      const said = [ranges.length && `ranks ${ranks.value}`, state.value && state.selectedOptions[0].text,
        group.value && `error ${group.value}`, node.value.trim() && `node ${node.value}`].filter(Boolean);
      find("#ff-filtered").textContent = said.length ? `Only ${said.join("; ")}: ${count}.` : "";
      start = isWhole() ? opening : 0;
      draw();
    };
    const map = find("#ff-map");
    if (map) {
      const nodeAt = (event) => {
        const box = map.getBoundingClientRect();
        const cell = (box.width / map.viewBox.baseVal.width) * Number(map.dataset.cell);
        const column = Math.floor((event.clientX - box.left) / cell);
        return data.nodes[Math.floor((event.clientY - box.top) / cell) * Number(map.dataset.columns) + column];
      };
      map.addEventListener("mousemove", (event) => {
        const node = nodeAt(event);
        find("#ff-map-said").textContent = node ? node[0] : "";
      });
      // the field "part of its name" does the same with a keyboard
      map.addEventListener("click", (event) => {
        const node = nodeAt(event);
        if (!node) return;
        form.elements.node.value = node[0];
        filter();
      });
    }
    form.elements.group.append(...data.groups.map(([number, , what]) => new Option(`${number}: ${cut(what, 40)}`, number)));
    find("#ff-nodes").append(...data.nodes.map(([name]) => new Option("", name)));
    form.hidden = false;
    detail.hidden = false;
    form.addEventListener("input", filter);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(filter));
    // after Back some browsers fill in what was there
    addEventListener("pageshow", filter);
    filter();
  }

  // --- groups of identical errors: pages
  const paging = find(".ff-group-pages");
  if (paging) {
    const rows = find("#ff-group-table").tBodies[0];
    let start = 0;
    const draw = () => {
      rows.replaceChildren();
      for (const [number, state, what, line, count, ranks, later] of data.groups.slice(start, start + data.rows)) {
        const [slug, name] = data.states[state];
        const row = make("tr");
        row.id = `ff-group-${number}`;
        const stateCell = make("td", "ff-state");
        stateCell.append(make("span", `ff-mark ff-is-${slug}`, name));
        const text = make("td", "ff-text", `${line || what} `);
        if (later && slug !== "root") text.append(make("span", "ff-when", later));
        row.append(make("td", "", String(number)), stateCell, make("td", "", String(count)), make("td", "", ranks), text);
        rows.append(row);
      }
      const end = Math.min(start + data.rows, data.groups.length);
      markEnds(paging, start === 0, end >= data.groups.length);
      paging.querySelector("span").textContent = `errors ${start + 1} to ${end} of ${data.groups.length}`;
    };
    paging.hidden = false;
    showGroup = (number) => {
      start = Math.floor(data.groups.findIndex((group) => group[0] === number) / data.rows) * data.rows;
      draw();
    };
    turnedBy(paging, (by) => {
      start += by * data.rows;
      draw();
    });
    draw();
  }
})();
