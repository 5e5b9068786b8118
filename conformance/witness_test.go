//go:build linux

package conformance

import (
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/data"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/rules"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

func TestTheWitnessFindsAnAnswerThatTheRackDidNotGive(t *testing.T) {
	log := []adminapi.Request{{RequestID: "1", Operation: "disk_view", Status: 200},
		{RequestID: "2", Status: 400}}
	for name, test := range map[string]struct {
		seen rules.RecordedCall
		says string
	}{
		"the rack gave it": {rules.RecordedCall{RequestID: "1", Operation: "disk_view", Status: 200}, ""},
		"the rack refused it before it knew what it was": {rules.RecordedCall{RequestID: "2",
			Operation: "disk_view", Status: 400}, ""},
		"no answer came":  {rules.RecordedCall{Operation: "disk_view"}, ""},
		"another gave it": {rules.RecordedCall{RequestID: "3", Status: 200}, "did not give"},
		"a proxy gave it": {rules.RecordedCall{Status: 429}, ""},
		"it was another one": {rules.RecordedCall{RequestID: "1", Operation: "disk_delete",
			Status: 200}, "disk_delete"},
		"it was another code": {rules.RecordedCall{RequestID: "1", Operation: "disk_view",
			Status: 404}, "HTTP 404"},
	} {
		found := strings.Join(unknownTo(log, []rules.RecordedCall{test.seen}), "\n")
		if (found == "") != (test.says == "") || !strings.Contains(found, test.says) {
			t.Errorf("%s: found %q, want %q", name, found, test.says)
		}
	}
}

func TestTheWitnessFindsACallThatSucceededWithoutTheRack(t *testing.T) {
	began := time.Now()
	at := func(name, object string, code codes.Code) rpc {
		return rpc{name: name, object: object, code: code, began: began, took: time.Second}
	}
	// The run's own requests show the order. The rack's clock is of another day.
	own := []rules.RecordedCall{{RequestID: "before", Began: began.Add(-time.Second)},
		{RequestID: "after", Began: began.Add(2 * time.Second)}}
	id, create := uuid.NewString(), at("CreateVolume", "", codes.OK)
	later := create
	later.began = began.Add(1100 * time.Millisecond)
	for name, test := range map[string]struct {
		calls []rpc
		log   string
		found int
	}{
		"it was heard":               {[]rpc{create}, "before disk_create after", 0},
		"another was heard":          {[]rpc{create}, "before disk_list after", 1},
		"it was heard before":        {[]rpc{create}, "disk_create before after", 1},
		"it was heard after":         {[]rpc{create}, "before after disk_create", 1},
		"two were heard":             {[]rpc{later, create}, "before disk_create disk_create after", 0},
		"one of two was heard":       {[]rpc{later, create}, "before disk_create after", 1},
		"two at a time, one request": {[]rpc{create, create}, "before disk_create after", 0},
		"it was refused":             {[]rpc{at("CreateVolume", "", codes.NotFound)}, "before after", 0},
		"it needs no rack":           {[]rpc{at("NodeGetInfo", "", codes.OK)}, "before after", 0},
		"no such object can be":      {[]rpc{at("DeleteVolume", "invalid", codes.OK)}, "before after", 0},
		"the object could be there":  {[]rpc{at("DeleteVolume", id, codes.OK)}, "before after", 1},
	} {
		var log []adminapi.Request
		for word := range strings.FieldsSeq(test.log) {
			log = append(log, adminapi.Request{RequestID: word, Operation: word})
		}
		if found := unheard(log, own, test.calls); len(found) != test.found {
			t.Errorf("%s: found %q", name, found)
		}
	}
}

func TestASpecWithoutTheCallThatItIsAboutDoesNotPass(t *testing.T) {
	create, probe := rpc{name: "CreateVolume"}, rpc{name: "Probe"}
	for name, test := range map[string]struct {
		spec  string
		calls []rpc
		ok    bool
	}{
		"it called":     {"Controller Service CreateVolume should work", []rpc{create, probe}, true},
		"nothing":       {"Controller Service CreateVolume should work", nil, false},
		"another":       {"Controller Service CreateVolume should work", []rpc{probe}, false},
		"it names none": {"Node Service should work", []rpc{probe}, true},
		"a longer name's": {"ControllerPublishVolume should fail",
			[]rpc{{name: "NodePublishVolume"}}, false},
	} {
		if fault := aboutItself(test.spec, test.calls); (fault == "") != test.ok {
			t.Errorf("%s: %q", name, fault)
		}
	}
	check := data.Check{Calls: []string{"CreateVolume", "disk_create"}}
	if missing := notMade(check, []rpc{probe}); strings.Join(missing, " ") != "CreateVolume" {
		t.Errorf("not made: %q", missing)
	}
	if missing := notMade(check, []rpc{create}); missing != nil {
		t.Errorf("not made: %q", missing)
	}
}
