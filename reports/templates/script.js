"use strict";
const text = new Intl.Collator(undefined, { numeric: true });

// Sorting: empty values stay at the end in both directions.
function compare(a, b, sign) {
  if (a === b) return 0;
  if (a === "" || a === "—") return 1;
  if (b === "" || b === "—") return -1;
  const numbers = [Number(a), Number(b)];
  return sign * (numbers.some(Number.isNaN) ? text.compare(a, b) : numbers[0] - numbers[1]);
}

function key(row, column) {
  const cell = row.cells[column];
  return cell.dataset.sort ?? cell.textContent.trim();
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
      const body = table.tBodies[0];
      const rows = [...body.rows].map((row) => [key(row, column), row]);
      rows.sort((a, b) => compare(a[0], b[0], down ? -1 : 1));
      body.append(...rows.map((pair) => pair[1]));
    });
  });
}

// Filtering.
const all = document.getElementById("all");
if (all) {
  const search = document.getElementById("search");
  const selects = [...document.querySelectorAll("[data-filter]")];
  const shown = document.getElementById("shown");
  const rows = [...all.tBodies[0].rows].map((row) => [row, row.textContent.toLowerCase()]);
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const [row, content] of rows) {
      const fits = words.every((word) => content.includes(word))
        && selects.every((select) => !select.value || row.dataset[select.dataset.filter] === select.value);
      row.hidden = !fits;
      count += fits;
    }
    shown.value = `${count} of ${rows.length} cells`;
  };
  search.addEventListener("input", filter);
  selects.forEach((select) => select.addEventListener("change", filter));
  document.querySelector(".filters").hidden = false;
  filter();
  // A link to a cell must find it, whatever was filtered away.
  addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#cell-']");
    const row = link && document.getElementById(link.hash.slice(1));
    if (row && row.hidden) {
      search.value = "";
      selects.forEach((select) => (select.value = ""));
      filter();
    }
  });
}

addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => (one.open = true)));
