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
	heard := func(operation string, after time.Duration) adminapi.Request {
		return adminapi.Request{Operation: operation, Time: began.Add(after)}
	}
	id := uuid.NewString()
	for name, test := range map[string]struct {
		call  rpc
		heard adminapi.Request
		found bool
	}{
		"it was heard":              {at("CreateVolume", "", codes.OK), heard("disk_create", 5), false},
		"another was heard":         {at("CreateVolume", "", codes.OK), heard("disk_list", 5), true},
		"it was heard before":       {at("CreateVolume", "", codes.OK), heard("disk_create", -5), true},
		"it was heard after":        {at("CreateVolume", "", codes.OK), heard("disk_create", 2e9), true},
		"it was refused":            {at("CreateVolume", "", codes.NotFound), heard("ping", 5), false},
		"it needs no rack":          {at("NodeGetInfo", "", codes.OK), heard("ping", 5), false},
		"no such object can be":     {at("DeleteVolume", "invalid", codes.OK), heard("ping", 5), false},
		"the object could be there": {at("DeleteVolume", id, codes.OK), heard("ping", 5), true},
	} {
		found := unheard([]adminapi.Request{test.heard}, []rpc{test.call})
		if (len(found) > 0) != test.found {
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
