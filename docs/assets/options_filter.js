// Pages of options: a field; rows without all its words go. On the first page it looks through all of them.
// options.html#q=recorded+dump fills it.
(function () {
  "use strict";
  if (!/\/options(_\w+)?\.html$/.test(location.pathname)) return;
  var article = document.querySelector("article");
  var title = article.querySelector("h1");
  var all = document.getElementById("all-options");
  var tables = Array.prototype.slice.call((all || article).querySelectorAll("table"));
  article.classList.add("options-page");
  article.querySelectorAll("table").forEach(function (table) {  // a narrow window shows rows without a head
    var names = Array.prototype.map.call(table.querySelectorAll("th"), function (cell) { return cell.textContent; });
    table.querySelectorAll("tbody tr").forEach(function (row) {
      Array.prototype.forEach.call(row.cells, function (cell, number) {
        if (number) cell.dataset.column = names[number];
      });
    });
  });
  var label = all ? "Find an option, e.g. recorded dump" : "Filter this page";
  var field = document.createElement("input");
  field.type = "search";
  field.className = "options-filter";
  field.placeholder = label;
  field.setAttribute("aria-label", label);
  var found = document.createElement("p");
  found.setAttribute("role", "status");
  title.after(field, found);
  var rest = all ? Array.prototype.filter.call(article.children, function (child) {
    return [title, field, found, all].indexOf(child) < 0;
  }) : [];
  function show() {
    var words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    var count = 0;
    tables.forEach(function (table) {
      var holder = table.closest("section, .md-typeset__scrollwrap") || table;
      var here = 0;
      table.querySelectorAll("tbody tr").forEach(function (row) {
        var text = row.textContent.toLowerCase();
        row.hidden = !words.every(function (word) { return text.indexOf(word) >= 0; });
        here += !row.hidden;
      });
      holder.hidden = !here;
      count += here;
    });
    if (all) {
      all.hidden = !words.length;
      rest.forEach(function (child) { child.hidden = words.length > 0; });
    }
    found.textContent = words.length ? count + (count === 1 ? " row" : " rows") : "";
    found.hidden = !words.length;
  }
  field.addEventListener("input", show);
  field.value = decodeURIComponent((/^#q=(.*)/.exec(location.hash) || ["", ""])[1].replace(/\+/g, " "));
  show();
})();
