"use strict";
(() => {
  const key = (row, column) => {
    const cell = row.cells[column];
    if ("value" in cell.dataset) return Number(cell.dataset.value);
    const text = cell.textContent.trim();
    return text === "–" ? null : text;
  };
  const compare = (a, b) => {
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), undefined, { numeric: true });
  };
  function sort(table, column, descending) {
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => [key(row, column), row]);
    // what is missing stays last in both directions
    rows.sort(([a], [b]) => (a === null) - (b === null) || (descending ? -1 : 1) * compare(a, b));
    body.append(...rows.map(([, row]) => row));
  }
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const first = head.classList.contains("number") ? "descending" : "ascending";
        const other = first === "descending" ? "ascending" : "descending";
        const order = head.getAttribute("aria-sort") === first ? other : first;
        heads.forEach((each) => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", order);
        sort(table, column, order === "descending");
      });
    });
  }

  const filters = [...document.querySelectorAll(".filters button")];
  for (const button of filters) {
    button.addEventListener("click", () => {
      filters.forEach((each) => each.setAttribute("aria-pressed", String(each === button)));
      const rest = document.querySelector(".untested-claims");
      if (rest) rest.open = button.dataset.verdict === "untested";
      for (const claim of document.querySelectorAll(".claim")) {
        claim.hidden = Boolean(button.dataset.verdict) && !claim.dataset.verdicts.split(" ").includes(button.dataset.verdict);
      }
    });
  }
})();
