"use strict";
const text = new Intl.Collator(undefined, { numeric: true });

// Sorts with empty values at the end in both directions.
function compare(a, b, sign) {
  if (a === b) return 0;
  if (a === "" || a === "—") return 1;
  if (b === "" || b === "—") return -1;
  const numbers = [Number(a), Number(b)];
  return sign * (numbers.some(Number.isNaN) ? text.compare(a, b) : numbers[0] - numbers[1]);
}

function key(row, column) {
  const cell = row.cells[column];
  return cell.dataset.value ?? cell.firstElementChild?.dataset.value ?? cell.textContent.trim();
}

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      for (const body of table.tBodies) {
        const rows = [...body.querySelectorAll("tr:not(.group)")].map((row) => [key(row, column), row]);
        rows.sort((a, b) => compare(a[0], b[0], down ? -1 : 1));
        body.append(...rows.map((pair) => pair[1]));
      }
      table.dispatchEvent(new Event("sorted"));
    });
  });
}

// Opens all closed sections around a link's target, and the details of a cell.
function unfold(hash) {
  const target = hash.length > 1 ? document.getElementById(hash.slice(1)) : null;
  const details = target?.querySelector("th > details");
  if (details) details.open = true;
  let was = true;
  for (let one = target?.closest("details"); one; one = one.parentElement.closest("details")) {
    was &&= one.open;
    one.open = true;
  }
  return was ? null : target;
}
addEventListener("click", (event) => unfold(event.target.closest("a[href^='#']")?.hash ?? ""));
addEventListener("hashchange", () => unfold(location.hash)?.scrollIntoView());

for (const command of document.querySelectorAll(".command")) {
  const button = document.createElement("button");
  button.textContent = "copy";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(command.textContent);
    button.textContent = "copied";
  });
  command.after(" ", button);
}

// Filters rows. Lays out only the first FEW matches, to respond within 200 ms; a click or printing shows the rest.
const FEW = 200;
const all = document.getElementById("all");
if (all) {
  const search = document.getElementById("search");
  const selects = [...document.querySelectorAll("[data-filter]")];
  const shown = document.getElementById("shown");
  const more = document.getElementById("more");
  const rows = () => all.querySelectorAll("tbody tr:not(.group)");
  const groups = [...all.querySelectorAll("tr.group")];
  const heading = (row) => row.parentElement.querySelector(".group")?.textContent ?? "";
  const texts = new Map([...rows()].map((row) => [row, `${row.textContent} ${heading(row)}`.toLowerCase()]));
  let linked = null;
  const filter = (most) => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows()) {
      const content = texts.get(row);
      const fits = words.every((word) => content.includes(word))
        && selects.every((select) => !select.value || row.dataset[select.dataset.filter] === select.value);
      count += fits;
      const later = fits && count > most && row !== linked;
      if (row.hidden === fits) row.hidden = !fits;
      if (row.classList.contains("later") !== later) row.classList.toggle("later", later);
    }
    for (const group of groups) {
      const body = group.parentElement;
      body.hidden = !body.querySelector("tr:not(.group):not([hidden])");
      body.classList.toggle("later", !body.querySelector("tr:not(.group):not([hidden]):not(.later)"));
    }
    shown.value = `${count} of ${texts.size} cells${count > most ? `, the first ${most} shown` : ""}`;
    more.hidden = count <= most;
    more.textContent = `show all ${count}`;
  };
  const first = () => filter(FEW);
  search.addEventListener("input", first);
  selects.forEach((select) => select.addEventListener("change", first));
  all.addEventListener("sorted", () => filter(more.hidden ? Infinity : FEW));
  more.addEventListener("click", () => { filter(Infinity); all.parentElement.focus(); });
  // Shows a linked cell even if it is filtered out or beyond the first FEW.
  const reveal = (hash) => {
    const row = hash.startsWith("#cell-") && document.getElementById(hash.slice(1));
    if (!row) return;
    linked = row;
    if (row.hidden) {
      search.value = "";
      selects.forEach((select) => (select.value = ""));
    }
    if (row.hidden || row.classList.contains("later")) first();
  };
  addEventListener("click", (event) => reveal(event.target.closest("a[href^='#cell-']")?.hash ?? ""));
  addEventListener("hashchange", () => {
    reveal(location.hash);
    document.querySelector("#all tr:target")?.scrollIntoView();
  });
  document.querySelector(".filters").hidden = false;
  linked = document.getElementById(location.hash.slice(1));
  first();
}

// Shows ticked cells side by side, as columns, with throughput and memory relative to the first one's.
const chosen = document.getElementById("chosen");
if (all && chosen) {
  const name = (row) => (row.querySelector(".name") ?? row.cells[0]).textContent.trim();
  const boxes = [...all.tBodies[0].rows].map((row) => {
    const box = document.createElement("input");
    box.type = "checkbox";
    box.setAttribute("aria-label", `compare ${name(row)}`);
    row.cells[0].prepend(box, " ");
    box.addEventListener("change", draw);
    return [box, row];
  });
  const heads = [...all.tHead.rows[0].cells].map((head) => head.textContent.trim());

  function add(row, tag, content, scope) {
    const cell = document.createElement(tag);
    cell.textContent = content;
    if (scope) cell.scope = scope;
    row.append(cell);
  }

  function value(row, field) {
    const found = row.querySelector(`[data-field="${field}"]`);
    return found && found.dataset.value !== "" ? Number(found.dataset.value) : NaN;
  }

  function draw() {
    const rows = boxes.filter(([box]) => box.checked).map(([, row]) => row);
    chosen.hidden = rows.length < 2;
    chosen.replaceChildren();
    if (chosen.hidden) return;
    const scroll = document.createElement("div");
    scroll.className = "scroll";
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", "The ticked cells side by side");
    const table = scroll.appendChild(document.createElement("table"));
    const top = table.createTHead().insertRow();
    add(top, "th", "Side by side", "col");
    rows.forEach((row) => add(top, "th", name(row), "col"));
    const body = table.createTBody();
    for (const [field, words] of [["samples_per_second", "throughput, times the first"], ["peak_memory_bytes", "peak memory, times the first"]]) {
      const line = body.insertRow();
      add(line, "th", words, "row");
      rows.forEach((row) => {
        const ratio = value(row, field) / value(rows[0], field);
        add(line, "td", Number.isFinite(ratio) ? ratio.toFixed(3) : "—");
      });
    }
    heads.forEach((head, column) => {
      const texts = rows.map((row) => row.cells[column].textContent.trim());
      if (column && texts.some((one) => one !== texts[0] || one !== "—")) {
        const line = body.insertRow();
        add(line, "th", head, "row");
        texts.forEach((one) => add(line, "td", one));
      }
    });
    const clear = document.createElement("button");
    clear.textContent = "untick all";
    clear.addEventListener("click", () => { boxes.forEach(([box]) => { box.checked = false; }); draw(); });
    const note = document.createElement("p");
    note.className = "small";
    note.append("Ratios of the figures in the table; the column Place says which cells are tied. ", clear);
    chosen.append(scroll, note);
  }
}

// Opens all closed sections for printing, and closes them again afterwards.
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  opened.forEach((one) => (one.open = true));
});
addEventListener("afterprint", () => opened.forEach((one) => (one.open = false)));
unfold(location.hash)?.scrollIntoView();
