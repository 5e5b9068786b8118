package report

import (
	"encoding/json"
	"encoding/xml"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// reports returns a report of each kind.
func reports() map[string]*Report {
	interrupted := example()
	interrupted.Verdict, interrupted.Why = InterruptedRun, "The run was interrupted by SIGINT."
	for i := range interrupted.Results {
		if r := &interrupted.Results[i]; r.Status == Failed {
			r.Status = Interrupted
		}
	}
	return map[string]*Report{"full": good(), "empty": minimal(), "failed": example(),
		"interrupted": interrupted, "hostile": hostile()}
}

func TestReadReturnsEveryKindOfReportThatWasWritten(t *testing.T) {
	for name, want := range reports() {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "new", "folder")
			if err := Write(dir, want); err != nil {
				t.Fatal(err)
			}
			for _, path := range []string{dir, filepath.Join(dir, "report.json")} {
				got, err := Read(path)
				if err != nil {
					t.Fatal(err)
				}
				// The text of a rack is written as plain text.
				if diff := cmp.Diff(want.scrub(nil), got, cmpopts.EquateEmpty()); diff != "" {
					t.Errorf("Read(%q) differs (-want +got):\n%s", path, diff)
				}
			}
			var names []string
			for _, entry := range must(os.ReadDir(dir))(t) {
				names = append(names, entry.Name())
			}
			if want := []string{"index.html", "junit.xml", "report.json"}; !slices.Equal(names, want) {
				t.Errorf("the folder has %q, expected %q", names, want)
			}
		})
	}
}

func must[T any](value T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return value
	}
}

func TestAReportThatDoesNotAddUpIsWrittenAndRefused(t *testing.T) {
	r, dir := example(), filepath.Join(t.TempDir(), "report")
	r.Verdict = Conforms
	err := Write(dir, r)
	if err == nil || !strings.Contains(err.Error(), `the verdict is "conforms", but`) {
		t.Errorf("Write: %v, expected an error that names the verdict", err)
	}
	if _, err := os.Stat(filepath.Join(dir, pageFile)); err != nil {
		t.Error(err)
	}
	if _, err := Read(dir); err == nil {
		t.Error("Read accepts a verdict that does not follow from the results")
	}
}

func TestAFolderThatCannotBeWrittenIsNamed(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := Write(file, good()); err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("Write to a file: %v, expected an error that names it", err)
	}
}

func TestTheSchemaHasThePropertiesOfTheTypes(t *testing.T) {
	var schema map[string]any
	if err := json.Unmarshal(schemaText, &schema); err != nil {
		t.Fatal(err)
	}
	definitions := schema["$defs"].(map[string]any)
	seen := map[string]bool{"counts": true} // has keys of any name
	var compare func(object map[string]any, goType reflect.Type)
	visit := func(property any, goType reflect.Type) {
		for goType.Kind() == reflect.Slice || goType.Kind() == reflect.Map {
			goType = goType.Elem()
			if items, ok := property.(map[string]any)["items"]; ok {
				property = items
			}
		}
		if goType.Kind() != reflect.Struct || goType.Name() == "Time" {
			return
		}
		reference, _ := property.(map[string]any)["$ref"].(string)
		name := strings.TrimPrefix(reference, "#/$defs/")
		if name != strings.ToLower(goType.Name()) {
			t.Errorf("a property of the type %s refers to %q", goType, reference)
			return
		}
		seen[name] = true
		compare(definitions[name].(map[string]any), goType)
	}
	compare = func(object map[string]any, goType reflect.Type) {
		var all, required []string
		for i := range goType.NumField() {
			name, option, _ := strings.Cut(goType.Field(i).Tag.Get("json"), ",")
			all = append(all, name)
			if option == "" {
				required = append(required, name)
			}
			visit(object["properties"].(map[string]any)[name], goType.Field(i).Type)
		}
		var inSchema []string
		for _, name := range object["required"].([]any) {
			inSchema = append(inSchema, name.(string))
		}
		if diff := cmp.Diff(required, inSchema); diff != "" {
			t.Errorf("what %s requires differs (-type +schema):\n%s", goType, diff)
		}
		slices.Sort(all)
		properties := slices.Sorted(maps.Keys(object["properties"].(map[string]any)))
		if diff := cmp.Diff(all, properties); diff != "" {
			t.Errorf("the properties of %s differ (-type +schema):\n%s", goType, diff)
		}
		if object["additionalProperties"] != false {
			t.Errorf("the schema of %s allows additional properties", goType)
		}
	}
	compare(schema, reflect.TypeFor[Report]())
	if unused := len(definitions) - len(seen); unused != 0 {
		t.Errorf("%d definitions of the schema belong to no type", unused)
	}
}

func TestJUnitHasEveryResultAndTheVerdict(t *testing.T) {
	for name, r := range reports() {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "report")
			if err := Write(dir, r); err != nil {
				t.Fatal(err)
			}
			var all testSuites
			text := must(os.ReadFile(filepath.Join(dir, junitFile)))(t)
			if err := xml.Unmarshal(text, &all); err != nil {
				t.Fatal(err)
			}
			want := junitCounts{Tests: len(r.Results) + 1, Failures: r.Count(Failed),
				Errors: r.Count(Interrupted), Skipped: r.Count(Blocked) + r.Count(NotTested) +
					r.Count(NotApplicable),
				Time: all.Time}
			switch r.Verdict {
			case Conforms:
			case DoesNotConform:
				want.Failures++
			default:
				want.Errors++
			}
			if diff := cmp.Diff(want, all.junitCounts); diff != "" {
				t.Errorf("the counts differ (-want +got):\n%s", diff)
			}
			var sum, cases junitCounts
			for _, suite := range all.Suites {
				sum.Tests += suite.Tests
				sum.Failures += suite.Failures
				sum.Errors += suite.Errors
				sum.Skipped += suite.Skipped
				for _, c := range suite.Cases {
					cases.Tests++
					cases.Failures += count01(c.Failure)
					cases.Errors += count01(c.Error)
					cases.Skipped += count01(c.Skipped)
				}
			}
			want.Time = ""
			if sum != want || cases != want {
				t.Errorf("the suites have %+v and the cases %+v, expected %+v", sum, cases, want)
			}
		})
	}
}

func count01(message *junitMessage) int {
	if message == nil || message.Message == "" {
		return 0
	}
	return 1
}
