// Reads the run's data from the page and shows it, section by section.

const content = JSON.parse(byId("content").textContent);
showHead(content);
showHeadline(content.headline);
showGrids(content.grids);
byId("curves").hidden = !Object.values(content.curves).some((charts) => charts.length);
showCharts(byId("chart-reward"), content.curves.reward, 260);
showCharts(byId("charts-parts"), content.curves.parts);
showCharts(byId("charts-held-out"), content.curves.held_out);
showCharts(byId("charts-health"), content.curves.health);
byId("more-charts").hidden = !content.curves.others.length;
showCharts(byId("charts-others"), content.curves.others);
showTimeline(content.timeline);
showUtilization(content.utilization, content.timeline);
showPrediction(content.prediction);
showRecipe(content);
addThemeButton();
window.addEventListener("resize", repaintAll);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaintAll);
